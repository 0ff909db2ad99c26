"""A release folder with one bundle that was compiled ahead of time: the compiled bundle, and `aot.json` of it.

Of a language bundle it is one, too: metadata, plan and tokenizer are its twin's, which holds the bundle that was
compiled, but for the bundle's name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError
from workflow_scripts.files import place_file, place_tree, tree_files, write_json
from workflow_scripts.manifest import manifest_path, read_manifest
from workflow_scripts.release.names import AOT, METADATA, PLAN, PROVENANCE
from workflow_scripts.release.package import describe


def read_record(folder: Path) -> dict[str, Any]:
    """The content of a folder's `aot.json`: what was asked for, by which tool, and what came out."""
    return json.loads((folder / AOT).read_text(encoding="utf-8"))


def shared_identities(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of compiled bundles by name (their aot.json), those that a device's cache cannot tell apart.

    A device caches by the hash of the program alone. Two bundles whose weights differ and whose programs do not were
    served for one another (published), so no release may hold both.
    """
    named: dict[str, list[str]] = {}
    for name, record in sorted(records.items()):
        if record["main_hash"] is not None:
            named.setdefault(record["main_hash"], []).append(name)
    return [" and ".join(names) for names in named.values() if len(names) > 1]


def place_compiled(result: Path, out: Path) -> None:
    """Place the compiled bundle of an `aot` result in `out`, and write what it was made of."""
    compiled = read_record(result)["compiled"]
    place_tree(result / compiled, out / compiled)
    place_file(result / AOT, out / AOT)
    write_json(out / PROVENANCE, {compiled: describe(read_manifest(manifest_path(result)))})


def place_language(twin: Path, out: Path) -> None:
    """Make `out`, which holds a compiled bundle, the language bundle that `twin` is.

    Raises UserError where the twin holds another bundle than the one that was compiled.
    """
    record, (made_of,) = read_record(out), _provenance(out).values()
    packaged = _provenance(twin).get(record["bundle"])
    if packaged is None or packaged["digest"] != made_of["inputs"]["bundle"]:
        raise UserError(
            f"{record['compiled']} was compiled from another {record['bundle']} than {twin.name} holds: run again"
        )
    for path in tree_files(twin):
        name = path.relative_to(twin)
        if name.parts[0] not in (record["bundle"], PROVENANCE, METADATA, PLAN):
            place_file(path, out / name)
    metadata, plan = (json.loads((twin / name).read_text(encoding="utf-8")) for name in (METADATA, PLAN))
    assets = _renamed(metadata["assets"], record)
    write_json(out / METADATA, {**metadata, "assets": assets})
    write_json(out / PLAN, {**plan, "bundles": _renamed(plan["bundles"], record)})


def _renamed(names: dict[str, str], record: dict[str, Any]) -> dict[str, str]:
    """Role -> bundle, with the compiled one in the place of what it was made of."""
    return {role: record["compiled"] if name == record["bundle"] else name for role, name in names.items()}


def _provenance(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
