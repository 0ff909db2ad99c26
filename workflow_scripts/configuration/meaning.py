"""What one key alone cannot say: names that meet, roles of a folder, gates that would judge nothing."""

import math
import re
import string
from collections.abc import Iterator
from typing import Any

from workflow_scripts.checkpoint.needed import REHEARSAL
from workflow_scripts.configuration.aot import aot_problems, compiled_names
from workflow_scripts.configuration.build import published_name
from workflow_scripts.configuration.chunks import chunk_set_problems, engine_problems, roles_of
from workflow_scripts.configuration.data import (
    DECODE,
    DRIVERS,
    FEEDING,
    FORMS,
    FRONTEND,
    GATES,
    HUB_ADDRESS,
    KERNEL_BITS,
    LONG_RUN,
    REPOSITORY,
    TABLE_FORMS,
    Config,
)
from workflow_scripts.configuration.states import language_problems, state_problems
from workflow_scripts.configuration.wording import allowed, show, twice
from workflow_scripts.release.names import (
    AOT,
    CATALOG,
    CHUNKS_PLAN,
    COMPILE_SCRIPT,
    METADATA,
    PLAN,
    PROVENANCE,
    README,
    RECORDS,
    TOKENIZER,
)
from workflow_scripts.store.shared import holds_password

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PUBLISHED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PLACEHOLDERS = ("slug", "layers")
_IN_A_FOLDER = (TOKENIZER, PROVENANCE, PLAN, CHUNKS_PLAN, METADATA, AOT)
_IN_A_RELEASE = (README, COMPILE_SCRIPT, CATALOG, *RECORDS)
_LICENCES = ("license", "licence", "notice")  # a release carries the checkpoint's files that begin so
_TARGETS = (
    "release",
    "gates",
    "bundles",
    "aot",
    "publish",
    "report",
    "plan",
    "tiny_checkpoint",
    "rehearsal_checkpoint",
    "coreml_reference",
)
_NO_TARGET = {
    "bundle": "no folder holds a bundle and gates.evidence names none",
    "kernel bundle": "no folder holds a bundle with Metal kernels",
    "engine bundle": "no folder holds a bundle for the Neural Engine",
    "recipe": "no bundle of a folder or of gates.evidence has a recipe",
    "tables": "no folder holds raw tables",
    "folder": "no folder has a driver to chat with",
    "folders": "fewer than two folders have a driver to chat with",
    "chunk folder": "no folder has the driver chunks",
    "kernel folder": "no folder with a driver holds a bundle with Metal kernels",
}


def meaning_problems(raw: dict[str, Any]) -> Iterator[str]:
    """Problems between the keys of a configuration of the right shape."""
    yield from _checkpoint_problems(raw["checkpoint"])
    yield from _oracle_problems(raw["oracle"], raw["context"])
    yield from _artifact_problems(raw)
    for name, folder in raw["folders"].items():
        yield from _folder_name_problems(name)
        yield from _folder_problems(f"folders.{name}", folder, raw["artifacts"])
        yield from _tables_in_problems(name, folder, raw["folders"])
        yield from chunk_set_problems(f"folders.{name}", folder, raw)
        yield from language_problems(f"folders.{name}", folder, raw)
    yield from twice({f"folders.{name}": name for name in raw["folders"]})
    yield from _evidence_problems(raw["gates"]["evidence"], raw["artifacts"])
    yield from _coreml_problems(raw)
    yield from _publish_problems(raw)
    if holds_password(raw["store"]["shared"]):  # which is not shown here either
        yield (
            "store.shared: holds a password; take it out, and give credentials in variables of the environment, "
            "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def gate_problems(config: Config) -> Iterator[str]:
    """Gates that would judge nothing: without targets they would vanish silently, else fail at the end."""
    listed = {"gates.required": config.gates.required, "gates.reported": config.gates.reported}
    for gate in sorted({*config.gates.required} & {*config.gates.reported}):
        yield f"gates.reported: has {gate}, which gates.required has, too; leave it in one of them"
    for place, gates in listed.items():
        for gate in gates:
            yield from (f"{place}: has {gate}, but {problem}" for problem in _idle_problems(config, gate))
    if "chat" in {*config.gates.required, *config.gates.reported}:
        yield from _chat_problems(config)


def _idle_problems(config: Config, gate: str) -> Iterator[str]:
    """Why a gate would have nothing to judge, or nothing to compare with."""
    dialogues = config.oracle.dialogues.values()
    if not config.gate_targets(gate, config.judged().values()):
        yield f"{_NO_TARGET[GATES[gate]]}; add one, or take {gate} out"
    if gate == "agreement" and not config.agreeing():
        yield f"it compares the ids of {', '.join(FEEDING)}, and none of them is required; add one"
    if gate in ("numbers", "chunks", "fp16") and not any(d.numbers for d in dialogues):
        yield "no entry of oracle.dialogues has numbers: true to compare"
    if gate in ("tokens", "gpu") and all(d.fed_at_least >= LONG_RUN for d in dialogues):
        yield (
            f"every entry of oracle.dialogues feeds {LONG_RUN} positions or more, which belongs to long_run; "
            "add a shorter one"
        )
    if gate == "tokens":
        for folder in filter(lambda folder: folder.can_chat, config.folders.values()):
            room = config.positions(folder)
            if all(d.fed_at_least > room for d in dialogues if d.fed_at_least < LONG_RUN):
                yield (
                    f"every entry of oracle.dialogues that belongs to it feeds more than the {room} positions of "
                    f"folders.{folder.name}; add a shorter one"
                )
    if gate == "long_run":
        long = [d for d in dialogues if d.fed_if_full >= LONG_RUN]
        for folder in config.folders.values():
            room = config.positions(folder)
            if folder.can_chat and long and all(d.known_prompt > room for d in long):
                yield (
                    f"every entry of oracle.dialogues that belongs to it has a prompt of more than the {room} "
                    f"positions of folders.{folder.name}; add a shorter one, or give the folder's bundles more context"
                )
    if gate == "long_run" and not any(d.fed_if_full >= LONG_RUN for d in dialogues):
        yield (
            f"no entry of oracle.dialogues is known to feed {LONG_RUN} positions (prompt_ids + new_tokens - 1; of "
            f"turns only the tokenizer knows the length, so they count as one token and need new_tokens of {LONG_RUN} "
            "or more)"
        )


def _chat_problems(config: Config) -> Iterator[str]:
    """What a folder answers freely is compared with an answer that the oracle brought to its end."""
    for index, name in enumerate(config.gates.chat):
        place, dialogue = f"gates.chat[{index}]", config.oracle.dialogues.get(name)
        if dialogue is None:
            yield (
                f"{place}: oracle.dialogues has no entry {show(name)}; {allowed(name, config.oracle.dialogues)} "
                "(a model's file states gates.chat, else it is the embedded model's)"
            )
        elif dialogue.turns is None or not dialogue.stops:
            yield f"{place}: the dialogue {show(name)} needs turns and stops: true, so that its answer has an end"


def _checkpoint_problems(checkpoint: dict[str, Any]) -> Iterator[str]:
    source = checkpoint["source"]
    found = f"checkpoint.source: found {show(source)}"
    if "rehearsal" in checkpoint and source != REHEARSAL:
        yield f"{found} beside checkpoint.rehearsal; allowed: {REHEARSAL}, or leave that key out"
    if "rehearsal" not in checkpoint and source == REHEARSAL:
        yield (
            f"{found}, which needs checkpoint.rehearsal: the shape of the random weights. A folder of that name is "
            f"./{REHEARSAL}"
        )
    if "://" not in source:
        return
    hub = HUB_ADDRESS.fullmatch(source)
    if hub is None:
        yield f"{found}; allowed: a local folder, or hf://owner/name@<40-hex commit>"
    elif not _COMMIT.fullmatch(hub["revision"]) and not checkpoint["allow_moving_revision"]:
        yield (
            f"{found}; `{hub['revision']}` is not a full commit, so the weights could change under the same name. "
            f"Allowed: 40 hex digits, or any revision with checkpoint.allow_moving_revision: true"
        )


def _oracle_problems(oracle: dict[str, Any], context: int) -> Iterator[str]:
    if not math.isfinite(oracle["min_margin"]):
        yield f"oracle.min_margin: found {oracle['min_margin']}, needs a finite number"
    dialogues = oracle["dialogues"]
    yield from twice({f"oracle.dialogues[{index}].name": d["name"] for index, d in enumerate(dialogues)})
    for index, dialogue in enumerate(dialogues):
        yield from _dialogue_problems(f"oracle.dialogues[{index}] ({dialogue['name']})", dialogue, context)


def _dialogue_problems(path: str, dialogue: dict[str, Any], context: int) -> Iterator[str]:
    given = [key for key in ("turns", "prompt_ids") if key in dialogue]
    if len(given) != 1:
        yield f"{path}: found {' and '.join(given) or 'no prompt'}, needs exactly one of turns, prompt_ids"
    new_tokens = dialogue["new_tokens"]
    known = len(dialogue.get("prompt_ids", [])) or 1  # the length of a text is known to its tokenizer only
    if known + new_tokens - 1 > context:  # the last id of an answer is not fed
        at_least = "" if "prompt_ids" in dialogue else "at least "
        yield (
            f"{path}: {at_least}{known} prompt tokens and new_tokens: {new_tokens} do not fit context: {context}; "
            f"raise context or ask for fewer tokens"
        )
    expected = len(dialogue.get("expect_ids", []))
    if expected > new_tokens:
        yield f"{path}: expect_ids has {expected} ids, more than new_tokens: {new_tokens}"


def _artifact_problems(raw: dict[str, Any]) -> Iterator[str]:
    published: dict[str, str] = {}
    for key, artifact in raw["artifacts"].items():
        path = f"artifacts.{key}"
        yield from _form_problems(path, artifact)
        yield from engine_problems(path, artifact, raw)
        yield from state_problems(path, artifact, raw)
        yield from aot_problems(path, artifact)
        problem = _name_problem(artifact["name"])
        if problem:
            yield f"{path}.name: found {show(artifact['name'])}; {problem}"
        else:
            published[f"{path}.name"] = published_name(artifact, raw)
            published |= compiled_names(path, artifact, raw)
            yield from _reserved_problems(f"{path}.name", published_name(artifact, raw), _IN_A_FOLDER)
    yield from twice(published)
    yield from _frontend_problems(raw["artifacts"])


def _frontend_problems(artifacts: dict[str, Any]) -> Iterator[str]:
    """Front ends hold the rows of int8 tables, so these must be declared."""
    forms = {key: artifact["form"] for key, artifact in artifacts.items()}
    if "raw_tables" not in forms.values():
        for key in (key for key, form in forms.items() if form == "frontend"):
            yield f"artifacts.{key}: form frontend is made of int8 tables; needs an artifact of form raw_tables, too"


def _folder_name_problems(name: str) -> Iterator[str]:
    yield from _reserved_problems(f"folders.{name}", name, (*_IN_A_RELEASE, *_TARGETS))
    if name.lower().startswith(_LICENCES):
        yield f"folders.{name}: a release keeps names that begin with {', '.join(_LICENCES)} for licence files"


def _reserved_problems(path: str, name: str, reserved: tuple[str, ...]) -> Iterator[str]:
    if name.casefold() in {taken.casefold() for taken in reserved}:
        yield f"{path}: the name {show(name)} is reserved, as are {', '.join(t for t in reserved if t != name)}"


# Key of an artifact that depends on its form -> what it is, in the message that it is missing.
_OF_A_FORM = {
    "recipe": "a recipe",
    "compute": "a compute",
    "layers": "the layers [first, last) that it has",
    "context": "a context",
    "tables": "the raw tables that it is made with",
    "cache_minimum": "the fewest columns of its kv_cache",
    "capacities": "the columns of its kv_cache, one number for each function",
    "platforms": "the systems it is for",
}


def _form_problems(path: str, artifact: dict[str, Any]) -> Iterator[str]:
    """Keys that the form of an artifact needs or does not have, and what does not go together."""
    name = artifact["form"]
    form = FORMS[name]
    for key, what in _OF_A_FORM.items():
        if key in form.needs and key not in artifact:
            yield f"{path}.{key}: missing; form {name} needs {what}"
        if key not in (*form.needs, *form.may) and key in artifact:
            yield f"{path}.{key}: found {show(artifact[key])}; form {name} has no {key}, leave it out"
    if form.kernels and artifact.get("recipe") not in {None, *KERNEL_BITS}:
        yield (
            f"{path}.recipe: found {show(artifact['recipe'])}; the kernels of form {name} read palettes. "
            f"{allowed(artifact['recipe'], KERNEL_BITS)}"
        )
    if artifact.get("recipe") == "fp32" and artifact.get("compute") == "fp16":
        yield f"{path}.compute: found 'fp16' with recipe fp32; allowed: compute fp32, or recipe fp16"


def _name_problem(template: str) -> str | None:
    """What is wrong with the template of a published name, or None."""
    try:
        fields = [field for field in string.Formatter().parse(template) if field[1] is not None]
    except ValueError as problem:
        return f"its braces do not match ({problem}); allowed placeholders: {{slug}}, {{layers}}"
    for _, placeholder, spec, conversion in fields:
        if placeholder not in _PLACEHOLDERS:
            return f"unknown placeholder {{{placeholder}}}; {allowed(placeholder, _PLACEHOLDERS)}"
        if spec or conversion:
            return f"{{{placeholder}}} takes no format; write it bare"
    if not _PUBLISHED.fullmatch(template.format(slug="slug", layers=1)):
        return "allowed: letters, digits, dots, hyphens, underscores and the placeholders {slug}, {layers}"
    if template.endswith(".aimodel"):
        return "leave .aimodel out; bundles get it by themselves"
    return None


def _folder_problems(path: str, folder: dict[str, Any], artifacts: dict[str, Any]) -> Iterator[str]:
    driver, bundles, tables = folder.get("driver"), folder.get("bundles", {}), folder.get("tables", [])
    places = {f"{path}.bundles.{role}": key for role, key in bundles.items()}
    places |= {f"{path}.tables[{index}]": key for index, key in enumerate(tables)}
    if not places:
        yield f"{path}: has neither bundles nor tables, so nothing would lie in it"
    for place, key in places.items():
        if key not in artifacts:
            yield f"{place}: there is no artifact {show(key)}; {allowed(key, artifacts)}"
    for index, key in enumerate(tables):
        form = artifacts.get(key, {}).get("form", "raw_tables")
        if form not in TABLE_FORMS:
            yield (
                f"{path}.tables[{index}]: artifact {key} is of form {form}; allowed: form {' or '.join(TABLE_FORMS)}"
            )
    if driver is None:
        if bundles:
            yield f"{path}.driver: missing; bundles need a driver to run them. {allowed(None, DRIVERS)}"
        return
    if not folder.get("tokenizer"):
        yield f"{path}.tokenizer: missing or false; a folder with a driver needs tokenizer: true, its input is text"
    if driver != DECODE and FRONTEND in bundles and "tables_in" in folder:
        yield (
            f"{path}.tables_in: found {show(folder['tables_in'])} beside bundles.{FRONTEND}; embeddings come from one "
            "of them, leave the other out"
        )
    if driver != DECODE:
        yield from _role_problems(path, folder, artifacts)


def _tables_in_problems(name: str, folder: dict[str, Any], folders: dict[str, Any]) -> Iterator[str]:
    """A folder that takes its embeddings from another one's tables."""
    if "tables_in" not in folder:
        return
    other = folder["tables_in"]
    found = f"folders.{name}.tables_in: found {show(other)}"
    choice = [key for key, entry in folders.items() if entry.get("tables") and key != name]
    with_tables = allowed(other, choice) if choice else "no other folder has tables"
    if folder.get("driver") is None:
        yield f"{found}, but the folder has no driver to read them; leave it out"
    elif other == name:
        yield f"{found}, the folder itself; it names another one, whose tables stand in for a front end. {with_tables}"
    elif other not in folders:
        yield f"{found}, but there is no such folder; {with_tables}"
    elif not folders[other].get("tables"):
        yield f"{found}, but that folder has no tables; {with_tables}"


def _role_problems(path: str, folder: dict[str, Any], artifacts: dict[str, Any]) -> Iterator[str]:
    driver, bundles = folder["driver"], folder.get("bundles", {})
    roles = roles_of(driver, bundles)
    for role in bundles:
        if role not in roles:
            yield f"{path}.bundles.{role}: driver {driver} has no such role; {allowed(role, roles)}"
    for role, forms in roles.items():
        if role not in bundles:
            if role != FRONTEND:
                yield f"{path}.bundles.{role}: missing; driver {driver} needs the roles {', '.join(roles)}"
            elif "tables_in" not in folder:
                yield (
                    f"{path}.bundles.{role}: missing; driver {driver} needs the roles {', '.join(roles)}; or, in place "
                    f"of {role}, tables_in: a folder with raw tables"
                )
            continue
        form = artifacts.get(bundles[role], {}).get("form", forms[0])
        if form not in forms:
            yield (
                f"{path}.bundles.{role}: artifact {bundles[role]} is of form {form}; "
                f"allowed: form {' or '.join(forms)}"
            )


def _coreml_problems(raw: dict[str, Any]) -> Iterator[str]:
    """The Core ML reference is made with int8 tables of the release."""
    if "tables" not in raw.get("coreml", {}):
        return
    key, artifacts = raw["coreml"]["tables"], raw["artifacts"]
    choice = [name for name, entry in artifacts.items() if entry["form"] == "raw_tables"]
    if key not in choice:
        form = artifacts.get(key, {}).get("form")
        why = f"artifact {key} is of form {form}" if form else f"there is no artifact {show(key)}"
        yield f"coreml.tables: {why}, needs one of form raw_tables; {allowed(key, choice)}"


def _publish_problems(raw: dict[str, Any]) -> Iterator[str]:
    """Where a release goes is stated, never guessed."""
    repository = raw["repository"]
    if repository != "none" and not REPOSITORY.fullmatch(repository):
        yield f"repository: found {show(repository)}; allowed: OWNER/NAME on the Hugging Face Hub, or none"
    if raw["publish"] in (True, "yes") and raw["checkpoint"]["source"] == REHEARSAL:
        yield (
            f"publish: found {show(raw['publish'])}, but the weights are random (checkpoint.source: {REHEARSAL}): "
            "leave it false"
        )
    if raw["publish"] in (True, "yes") and repository == "none":
        yield (
            f"publish: found {show(raw['publish'])}, but there is no repository to publish to; needs repository: "
            "OWNER/NAME, too"
        )


def _evidence_problems(evidence: list[str], artifacts: dict[str, Any]) -> Iterator[str]:
    for index, key in enumerate(evidence):
        if key not in artifacts:
            yield f"gates.evidence[{index}]: there is no artifact {show(key)}; {allowed(key, artifacts)}"
        elif not FORMS[artifacts[key]["form"]].bundle:
            yield f"gates.evidence[{index}]: artifact {key} is no bundle, so no gate judges it"
