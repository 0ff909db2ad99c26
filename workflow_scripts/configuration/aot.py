"""Checks of what is compiled ahead of time: targets of one artifact, and what they become."""

from collections.abc import Iterator
from typing import Any

from workflow_scripts.configuration.build import platforms_of, published_stem, target_of
from workflow_scripts.configuration.data import FORMS, GROWING_FORMS
from workflow_scripts.configuration.wording import show
from workflow_scripts.coreai.architectures import Target, artifact_name, clashes, target_problems
from workflow_scripts.quantize.recipes import RECIPES, LinearEncoding


def aot_problems(path: str, artifact: dict[str, Any]) -> Iterator[str]:
    """What is known to go wrong with an artifact's targets, before it costs a build."""
    form = FORMS[artifact["form"]]
    targets = {
        f"{path}.aot[{index}]": target_of(entry) for index, entry in enumerate(artifact.get("aot", []))
    }
    if targets and not form.bundle:
        yield f"{path}.aot: form {artifact['form']} is no bundle, so there is nothing to compile; leave it out"
        return
    for where, target in targets.items():
        graph_problems = target_problems(
            target,
            linear_int4=_has_linear_int4(artifact.get("recipe")),
            dynamic=artifact["form"] in GROWING_FORMS,
            kernels=form.kernels,
        )
        yield from (
            f"{where}: {problem}" for problem in [*graph_problems, *_platform_problems(target, artifact)]
        )
    for architecture in clashes(list(targets.values())):
        yield f"{path}.aot: has architecture {architecture} twice, and what is compiled would share a name"


def compiled_names(path: str, artifact: dict[str, Any], raw: dict[str, Any]) -> dict[str, str]:
    """Place in the configuration -> published name, for each target of an artifact."""
    stem = published_stem(artifact, raw)
    entries = enumerate(artifact.get("aot", []))
    return {f"{path}.aot[{index}]": artifact_name(stem, target_of(entry)) for index, entry in entries}


def _has_linear_int4(recipe: str | None) -> bool:
    encodings = RECIPES[recipe].encodings.values() if recipe else ()
    return any(isinstance(encoding, LinearEncoding) and encoding.bits == 4 for encoding in encodings)


def _platform_problems(target: Target, artifact: dict[str, Any]) -> Iterator[str]:
    meant = platforms_of(artifact)
    if "platforms" in FORMS[artifact["form"]].may and target.platform.lower() not in meant:
        yield (
            f"found platform {show(target.platform)}, but the artifact's platforms are {', '.join(meant)}: "
            "state targets of its own, or aot: [] for none"
        )
