"""Checks of a decoder in chunks: each chunk's layers, and the chunks of a folder as one decoder.

That a chunk finds the K/V of earlier ones follows from the order: a producer is never behind its readers.
"""

import re
from collections.abc import Iterator
from typing import Any

from workflow_scripts.configuration.data import CHUNK, DRIVERS, ENGINE_CONTEXT, ENGINE_RECIPES, FORMS
from workflow_scripts.configuration.wording import allowed, show

_ROLE = re.compile(rf"{CHUNK}[1-9][0-9]*")
_SAME = ("context", "recipe", "compute")  # in all chunks of a folder


def roles_of(driver: str, bundles: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Role -> forms for a folder with some roles; chunks are numbered from 1 on, without a gap."""
    count = max(1, sum(1 for role in bundles if _ROLE.fullmatch(role)))
    roles: dict[str, tuple[str, ...]] = {}
    for role, forms in DRIVERS[driver].items():
        names = [f"{CHUNK}{number}" for number in range(1, count + 1)] if role == CHUNK else [role]
        roles |= dict.fromkeys(names, forms)
    return roles


def engine_problems(path: str, artifact: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    """Keys of one artifact: the range of layers and the context of a chunk, the recipe of what the engine runs."""
    form, recipe = artifact["form"], artifact.get("recipe")
    if FORMS[form].engine and recipe not in {None, *ENGINE_RECIPES}:
        yield (
            f"{path}.recipe: found {show(recipe)}; form {form} is for the Neural Engine, and linear codes do not "
            f"compile for it. {allowed(recipe, ENGINE_RECIPES)}"
        )
    if form != "ane_chunk":
        return
    yield from _layers_problems(path, artifact, raw["num_hidden_layers"])
    context = artifact.get("context", raw["context"])
    if context > ENGINE_CONTEXT:
        yield (
            f"{path}.context: {'found' if 'context' in artifact else 'without it,'} {context}; form {form} compares "
            f"positions in float16, which is exact up to {ENGINE_CONTEXT} only: give it a smaller one"
        )


def _layers_problems(path: str, artifact: dict[str, Any], total: int) -> Iterator[str]:
    if "layers" in artifact and not _is_range(artifact["layers"], total):
        yield (
            f"{path}.layers: found {show(artifact['layers'])}; allowed: [first, last) within [0, {total}) "
            "(num_hidden_layers), first is included and last is not"
        )


def chunk_set_problems(path: str, folder: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    """The chunks of one folder are all layers in order, each once, and of one kind."""
    total, chunks = raw["num_hidden_layers"], _chunks(folder, raw)
    if not chunks:
        return
    end = 0
    for role, chunk in chunks.items():
        first, last = chunk["layers"]
        if first != end:
            before = f"the one before it ends before layer {end}" if end else "it is the first"
            yield (
                f"{path}.bundles.{role}: has the layers [{first}, {last}), but {before}; the chunks of a folder are "
                f"all layers in order, each once, so it must start at {end}"
            )
            return
        end = last
    if end != total:
        yield (
            f"{path}.bundles: the chunks end before layer {end}, but num_hidden_layers is {total}; the layers "
            f"[{end}, {total}) are in none of them"
        )
    for key in _SAME:
        found = {role: chunk.get(key, raw.get(key)) for role, chunk in chunks.items()}
        if len({*found.values()}) > 1:
            each = ", ".join(f"{value} in {role}" for role, value in found.items())
            yield f"{path}.bundles: the chunks differ in {key} ({each}); all of a folder need the same"


def _chunks(folder: dict[str, Any], raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Role -> artifact, in order; empty where one of them is wrong by itself, which is told elsewhere."""
    bundles = folder.get("bundles", {})
    roles = [role for role in bundles if _ROLE.fullmatch(role)]
    chunks = {
        role: raw["artifacts"].get(bundles[role], {})
        for role in sorted(roles, key=lambda role: int(role.removeprefix(CHUNK)))
    }
    sound = all(_is_range(chunk.get("layers"), raw["num_hidden_layers"]) for chunk in chunks.values())
    return chunks if sound else {}


def _is_range(layers: Any, total: int) -> bool:
    return isinstance(layers, list) and len(layers) == 2 and 0 <= layers[0] < layers[1] <= total
