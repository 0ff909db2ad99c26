"""A release: its folders, README.md, release.json, measured.json, SHA256SUMS and statement.json.

Who says what: `release.json` lists every file but these four, `SHA256SUMS` and `statement.json` list release.json as
well, and nothing lists `measured.json`, which is sealed, as release.json is. So an altered byte anywhere can be pinned
on its file.
"""

import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workflow_scripts.coreai.architectures import Target, devices_of
from workflow_scripts.errors import UserError
from workflow_scripts.files import (
    canonical_json,
    place_file,
    place_tree,
    sha256_file,
    sha256_text,
    write_atomic,
)
from workflow_scripts.manifest import FileEntry, Manifest, content_digest, manifest_path, read_manifest
from workflow_scripts.release import readme, schema, seal, sums
from workflow_scripts.release.catalog import catalog
from workflow_scripts.release.compile_script import CompileJob, compile_script
from workflow_scripts.release.compiled import read_record, shared_identities
from workflow_scripts.release.gate_results import GateResult
from workflow_scripts.release.licence import Licence, read_licence
from workflow_scripts.release.names import (
    CATALOG,
    COMPILE_SCRIPT,
    FORMAT,
    MEASURED,
    PLAN,
    PROVENANCE,
    README,
    RELEASE,
    STATEMENT,
    SUMS,
)
from workflow_scripts.release.origin import check_origin, read_identity
from workflow_scripts.release.statement import statement_text


@dataclass(frozen=True)
class Ingredients:
    """Everything a release is made of: checked result folders by name, gates by name, and the configuration.

    `compiled` has, for each folder with a bundle that is compiled ahead of time where the host can, the path of the
    `bundle` and the `target`; `not_built` is why the host could not, and then `folders` has none of them.
    """

    model: str
    slug: str
    checkpoint: Path
    folders: dict[str, Path]
    weights: dict[str, Path]
    gates: dict[str, GateResult]
    gate_folders: dict[str, Path]
    required_gates: list[str]
    artifacts: dict[str, dict[str, Any]]
    compiled: dict[str, dict[str, Any]]
    not_built: str | None


def assemble(parts: Ingredients, out: Path) -> None:
    """Fill the empty folder `out` with the whole release. Raises UserError where the parts do not fit together."""
    manifests = {name: read_manifest(manifest_path(tree)) for name, tree in _trees(parts).items()}
    _check_one_checkpoint(parts, manifests)
    _check_contents(parts, manifests)
    _check_judged(parts, manifests)
    licence = read_licence(parts.checkpoint / "source")
    for name, tree in parts.folders.items():
        place_tree(tree, out / name)
    for path in licence.files:
        place_file(path, out / path.name)
    # The runner has just checked these folders, so their manifests spare hashing gigabytes once more.
    files = [
        FileEntry(f"{name}/{entry.path}", entry.size, entry.sha256)
        for name in parts.folders
        for entry in manifests[f"folder_{name}"].files
    ]
    files += [FileEntry(p.name, p.stat().st_size, sha256_file(p)) for p in licence.files]
    document = _describe(parts, manifests, licence, files)
    for name, text_of in TEXTS.items():  # each may say what the files before it are
        if text := text_of(document):
            write_atomic(out / name, text)
            files.append(FileEntry(name, len(text.encode()), sha256_text(text)))
            document["files"] = _file_list(files)
    _write_records(document, parts.gates.values(), out)


def _compile_script(document: Mapping[str, Any]) -> str | None:
    """A script for people with nothing but Xcode; None where nothing is to be compiled."""
    jobs = [CompileJob(entry["bundle"], Target(**entry["target"])) for entry in document["aot"].values()]
    return compile_script(jobs) if jobs else None


def _catalog(document: Mapping[str, Any]) -> str | None:
    """What coreai-kit's catalog says of the release; None where the kit could load nothing of it."""
    entry = catalog(document)
    return canonical_json(entry) if entry else None


TEXTS = {COMPILE_SCRIPT: _compile_script, CATALOG: _catalog, README: readme.render}


def _write_records(document: dict[str, Any], gates: Iterable[GateResult], out: Path) -> None:
    """Write release.json, measured.json, SHA256SUMS and statement.json; none if one is not of its schema."""
    release = seal.sealed_text(document)
    schema.check_release(json.loads(release))
    digests = {entry["path"]: entry["sha256"] for entry in document["files"]}
    digests[RELEASE] = sha256_text(release)
    statement = statement_text(document, digests)
    schema.check_statement(json.loads(statement))
    measured = {"format": FORMAT, "gates": {gate.name: gate.measured for gate in gates if gate.measured}}
    write_atomic(out / RELEASE, release)
    write_atomic(out / MEASURED, seal.sealed_text(measured))
    write_atomic(out / SUMS, sums.format_sums(digests))
    write_atomic(out / STATEMENT, statement)


def _trees(parts: Ingredients) -> dict[str, Path]:
    """Every input's folder by its input name."""
    return {
        "checkpoint": parts.checkpoint,
        **{f"folder_{name}": tree for name, tree in parts.folders.items()},
        **{f"gate_{name}": tree for name, tree in parts.gate_folders.items()},
        **{f"weights_{name}": tree for name, tree in parts.weights.items()},
    }


def _check_one_checkpoint(parts: Ingredients, manifests: Mapping[str, Manifest]) -> None:
    identity = read_identity(parts.checkpoint)
    for tree in parts.folders.values():
        for name in _provenance(tree):
            check_origin(tree / name, identity)
    expected = manifests["checkpoint"].digest
    for name, manifest in manifests.items():
        if manifest.ingredients.inputs.get("checkpoint", expected) != expected:
            raise UserError(
                f"{name} was made from another checkpoint than this release's: "
                f"delete {manifest_path(_trees(parts)[name])} and run again"
            )


def _check_contents(parts: Ingredients, manifests: Mapping[str, Manifest]) -> None:
    """What a folder says of its contents is true of the files that lie in it: by these digests gates are known.

    Of a compiled folder it is said of all that the compiler's stage gave, which `compiled.py` has placed.
    """
    for folder in parts.folders.keys() - parts.compiled.keys():
        tree = parts.folders[folder]
        for name, made_of in _provenance(tree).items():
            inside = [
                replace(entry, path=entry.path.removeprefix(f"{name}/"))
                for entry in manifests[f"folder_{folder}"].files
                if entry.path.startswith(f"{name}/")
            ]
            if content_digest(inside) != made_of["digest"]:
                raise UserError(
                    f"`{folder}/{name}` is not the result that {PROVENANCE} names (digest {made_of['digest'][:12]}): "
                    f"delete {manifest_path(tree)} and run again"
                )


def _check_judged(parts: Ingredients, manifests: Mapping[str, Manifest]) -> None:
    """A bundle that is published under a name is the one that the gates judged under it."""
    published = {
        name: made_of["digest"]
        for tree in parts.folders.values()
        for name, made_of in _provenance(tree).items()
    }
    for name, gate in parts.gates.items():
        target, judged = gate.verdict["target"], manifests[f"gate_{name}"].ingredients.inputs.get("bundle")
        if judged and published.get(target, judged) != judged:
            raise UserError(
                f"`{target}` is published with the digest {published[target][:12]}, but `{name}` judged "
                f"{judged[:12]}: correct the config, or run again"
            )


def _describe(
    parts: Ingredients, manifests: Mapping[str, Manifest], licence: Licence, files: list[FileEntry]
) -> dict[str, Any]:
    """The content of release.json but the README's entry in `files`; no times, hosts or paths of this machine."""
    artifacts = _artifacts(parts, files)
    compiled = _compiled(parts)
    return {
        "format": FORMAT,
        "model": parts.model,
        "slug": parts.slug,
        "checkpoint": _checkpoint(parts.checkpoint, manifests["checkpoint"]),
        "licence": {"name": licence.name, "link": licence.link, "files": [p.name for p in licence.files]},
        "recipes": _recipes(parts, manifests),
        "folders": {name: _folder(parts, manifests, name) for name in parts.folders},
        "artifacts": artifacts,
        "aot": compiled,
        "gates": {
            name: {
                **gate.verdict,
                "required": name in parts.required_gates,
                "inputs": manifests[f"gate_{name}"].ingredients.inputs,
            }
            for name, gate in parts.gates.items()
        },
        "tools": _tool_versions(
            [*(m.ingredients.tools for m in manifests.values()), *_compilers(compiled)], artifacts
        ),
        "files": _file_list(files),
    }


def _checkpoint(tree: Path, manifest: Manifest) -> dict[str, Any]:
    """Identity of the checkpoint: of its text weights and config, of its files, where it comes from, of the result."""
    document = json.loads((tree / "checkpoint.json").read_text(encoding="utf-8"))
    identity = {key: document[key] for key in ("digest", "origin", "files")}
    return {**identity, "result_digest": manifest.digest}


def _recipes(parts: Ingredients, manifests: Mapping[str, Manifest]) -> dict[str, Any]:
    """Each quantization recipe with the digest and total error of its weights, where they are an input."""
    names = {
        entry["recipe"] for entry in parts.artifacts.values() if entry.get("recipe")
    } | parts.weights.keys()
    recipes: dict[str, Any] = {}
    for name in sorted(names):
        recipes[name] = {"digest": None, "total": None}
        if name in parts.weights:
            report = json.loads((parts.weights[name] / "report.json").read_text(encoding="utf-8"))
            recipes[name] = {"digest": manifests[f"weights_{name}"].digest, "total": report["total"]}
    return recipes


def _compiled(parts: Ingredients) -> dict[str, Any]:
    """What the release's bundles are compiled for ahead of time, by folder, or why they are not.

    Raises UserError where a device could take one for another.
    """
    records = {name: read_record(parts.folders[name]) for name in parts.compiled if name in parts.folders}
    if shared := shared_identities(records):
        raise UserError(
            f"{shared[0]}: a device's cache cannot tell them apart, since their programs are equal and their weights "
            "are not; take the target out of `aot` of all but one"
        )
    lacking = sorted(parts.compiled.keys() - records.keys())
    if bool(lacking) != bool(parts.not_built):
        raise UserError(
            f"release {parts.model}: {', '.join(lacking) or 'nothing'} is not built: no reason fits"
        )
    return {
        name: {
            **entry,
            "devices": devices_of(Target(**entry["target"])),
            "not_built": parts.not_built,
            "tool": records[name]["tool"] if name in records else None,
        }
        for name, entry in parts.compiled.items()
    }


def _compilers(compiled: Mapping[str, Any]) -> list[dict[str, str]]:
    """Name -> version of each compiler, `coreai-build 3600.83.1`."""
    names = {entry["tool"] for entry in compiled.values() if entry["tool"]}
    return [{tool.partition(" ")[0]: tool.partition(" ")[2] or tool} for tool in sorted(names)]


def _folder(parts: Ingredients, manifests: Mapping[str, Manifest], name: str) -> dict[str, Any]:
    inside = manifests[f"folder_{name}"].files
    params = manifests[f"folder_{name}"].ingredients.params
    return {
        "digest": manifests[f"folder_{name}"].digest,
        "driver": params.get("driver"),
        "tables": _tables_read(parts, name),
        "contents": sorted(_provenance(parts.folders[name])),
        "files": len(inside),
        "bytes": sum(entry.size for entry in inside),
    }


def _tables_read(parts: Ingredients, name: str) -> list[dict[str, str]]:
    """The tables that a folder's plan names, as paths in the release with the digests of their results.

    Raises UserError where the release has not got them, or where a bundle of the folder was made with others.
    """
    plan = parts.folders[name] / PLAN
    if not plan.is_file():
        return []
    names = json.loads(plan.read_text(encoding="utf-8"))["tables"]
    paths = [posixpath.normpath(f"{name}/{table}") for table in names]
    digests = [_digest_in(parts, name, path) for path in paths]
    for bundle, made_of in _provenance(parts.folders[name]).items():
        # A front end holds its tables: it reads none beside it.
        made_with = None if made_of["stage"] == "export_frontend" else made_of["inputs"].get("tables")
        if digests and made_with and made_with not in digests:
            raise UserError(
                f"`{name}/{bundle}` was made with other tables (digest {made_with[:12]}) than those that its folder "
                f"reads, {', '.join(paths)}: correct the config, or run again"
            )
    return [{"path": path, "digest": digest} for path, digest in zip(paths, digests, strict=True)]


def _digest_in(parts: Ingredients, reader: str, path: str) -> str:
    """Digest of something published, by its path in the release."""
    folder, _, name = path.rpartition("/")
    published = _provenance(parts.folders[folder]) if folder in parts.folders else {}
    if name not in published:
        raise UserError(f"folder `{reader}` reads the tables {path}, which the release does not have")
    return published[name]["digest"]


def _provenance(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))


def _artifacts(parts: Ingredients, files: list[FileEntry]) -> dict[str, Any]:
    """Everything published, by name: what it is, where it lies, how big it is, what it was made of."""
    found: dict[str, Any] = {}
    for folder, tree in parts.folders.items():
        for name, made_of in _provenance(tree).items():
            declared = {"form": made_of["stage"], "recipe": None, "compute": None} | parts.artifacts.get(
                name, {}
            )
            known = found.setdefault(name, {**made_of, **declared, "folders": []})
            if known["digest"] != made_of["digest"]:
                raise UserError(
                    f"`{name}` is published with two contents: in {known['folders'][0]} and in {folder}"
                )
            known["folders"].append(folder)
            inside = [entry.size for entry in files if entry.path.startswith(f"{folder}/{name}/")]
            known["bytes"] = sum(inside)
    absent = sorted(parts.artifacts.keys() - found.keys())
    if absent:
        raise UserError(f"`{absent[0]}` is declared as an artifact, but no folder of the release has it")
    return found


def _tool_versions(direct: list[dict[str, str]], artifacts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Every version of every tool that had a part; a second version shows a release built on two hosts."""
    versions: dict[str, set[str]] = {}
    for tools in [*direct, *(entry["tools"] for entry in artifacts.values())]:
        for name, version in tools.items():
            versions.setdefault(name, set()).add(version)
    return {name: sorted(found) for name, found in sorted(versions.items())}


def _file_list(files: list[FileEntry]) -> list[dict[str, Any]]:
    ordered = sorted(files, key=lambda entry: entry.path)
    return [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in ordered]
