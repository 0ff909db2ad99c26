"""Checks of the forms whose kv_cache is a state: its sizes, what is known of systems, and the folders of decoders."""

from collections.abc import Iterator
from typing import Any

from workflow_scripts.configuration.build import context_of, platforms_of
from workflow_scripts.configuration.data import (
    BLOCK_FORMS,
    DECODE,
    DECODE_FORMS,
    GROWING_FORMS,
    PLATFORMS,
    TABLE_FORMS,
)
from workflow_scripts.configuration.wording import allowed, show

_FEWEST = 4  # columns; export takes fewer for special cases
IOS_GROWING = 2048  # columns from which on a growing kv_cache is miscompiled on iOS


def state_problems(path: str, artifact: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    """Sizes of one artifact's kv_cache, its tables, and its platforms."""
    yield from _size_problems(path, artifact, raw)
    yield from _table_problems(path, artifact, raw["artifacts"])
    yield from _ios_problems(path, artifact, raw)


def _size_problems(path: str, artifact: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    minimum, capacities = artifact.get("cache_minimum"), artifact.get("capacities")
    context = context_of(artifact, raw)
    if minimum is not None and not _FEWEST <= minimum < context:
        yield (
            f"{path}.cache_minimum: found {minimum}, needs {_FEWEST} to {context - 1}: the fewest columns of a "
            f"kv_cache that grows up to context: {context}"
        )
    if capacities is not None and list(capacities) != sorted({*capacities}):
        yield f"{path}.capacities: found {show(capacities)}; they must ascend, such as [1024, 4096]"


def _table_problems(path: str, artifact: dict[str, Any], artifacts: dict[str, Any]) -> Iterator[str]:
    key = artifact.get("tables")
    if key is None:
        return
    choice = [name for name, entry in artifacts.items() if entry["form"] in TABLE_FORMS]
    if key not in artifacts:
        yield f"{path}.tables: there is no artifact {show(key)}; {allowed(key, choice)}"
    elif key not in choice:
        form = artifacts[key]["form"]
        yield f"{path}.tables: artifact {key} is of form {form}; allowed: form {' or '.join(TABLE_FORMS)}"


def _ios_problems(path: str, artifact: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    """What people met on phones (coreai-models#124; the notes of the published bundles), before it costs a build."""
    form, context = artifact["form"], context_of(artifact, raw)
    found = f"{path}.platforms: found {show(list(platforms_of(artifact)))}"
    if "platforms" not in artifact:
        found = f"{path}.platforms: without it, {show(list(platforms_of(artifact)))}"
    if "ios" not in platforms_of(artifact):
        return
    if form in BLOCK_FORMS:
        yield (
            f"{found}; form {form} takes several positions in one call, which aborts on iOS (the compiler's scratch "
            f"memory overflows). Allowed: {show([*PLATFORMS[:1]])}; for iOS use form decode_ring or hostcache_core"
        )
    elif form in GROWING_FORMS and context >= IOS_GROWING:
        yield (
            f"{found} with context {context}; iOS miscompiles a growing kv_cache of {IOS_GROWING} columns or more: the "
            f"answer is noise from its first token on. Take ios out, give it a context below {IOS_GROWING}, or use "
            "form decode_ring, whose shapes never change"
        )


def language_problems(path: str, folder: dict[str, Any], raw: dict[str, Any]) -> Iterator[str]:
    """A folder of decoders: each reads its own tables, and they must lie in the folder that `tables_in` names."""
    if folder.get("driver") != DECODE:
        return
    artifacts, other = raw["artifacts"], folder.get("tables_in")
    if "tables" in folder:
        yield (
            f"{path}.tables: found {show(folder['tables'])}; driver {DECODE} makes a folder of each bundle, put the "
            "tables into a folder of their own and name it as tables_in"
        )
    if not folder.get("bundles"):
        yield f"{path}.bundles: missing; driver {DECODE} needs some of form {' or '.join(DECODE_FORMS)}"
    if other is None:
        yield f"{path}.tables_in: missing; driver {DECODE} needs the folder that holds the bundles' tables"
        return
    there = raw["folders"].get(other, {}).get("tables", [])
    for role, key in folder.get("bundles", {}).items():
        artifact = artifacts.get(key, {})
        form, tables = artifact.get("form", DECODE_FORMS[0]), artifact.get("tables")
        if form not in DECODE_FORMS:
            yield (
                f"{path}.bundles.{role}: artifact {key} is of form {form}; allowed: form {' or '.join(DECODE_FORMS)}"
            )
        elif tables and there and tables not in there:
            yield (
                f"{path}.bundles.{role}: artifact {key} reads the tables {tables}, but folders.{other} has "
                f"{', '.join(there)}; add {tables} to folders.{other}.tables"
            )
