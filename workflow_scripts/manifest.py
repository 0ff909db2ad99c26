"""The manifest of a result: what files it holds, one digest over them, and everything that went in.

A result is a folder `results/<model>/<stage>/<artifact>`; its manifest is the sibling `<artifact>.manifest.json`,
written last. Snakemake tracks the manifest, since it never looks into folders. No times, hosts or absolute paths.
Files whose name starts with `measured` hold figures that depend on the host (logit errors, seconds): they are
listed and checked, but are not part of the digest.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError
from workflow_scripts.files import (
    canonical_json,
    file_stamp,
    is_executable,
    sha256_file,
    sha256_text,
    tree_files,
    write_atomic,
    write_json,
)
from workflow_scripts.progress import Meter

SUFFIX = ".manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """One file of a result: path below the folder, size in bytes, hex sha256, whether it is executable."""

    path: str
    size: int
    sha256: str
    executable: bool = False

    @property
    def measured(self) -> bool:
        """True for figures of one host, which stay outside the digest."""
        return Path(self.path).name.startswith("measured")


@dataclass(frozen=True)
class Ingredients:
    """Everything that can change a result; its digest is the key under which the result is known.

    `code` maps each source file that the stage reaches to its sha256, so that a difference can be named; `inputs` maps
    an input's name to the digest of its content; `tools` a distribution to its version. `host` is what of the host
    may matter: it separates results in the store, and is no part of a release, which is the same from every host.
    """

    stage: str
    artifact: str
    code: dict[str, str]
    params: dict[str, Any]
    inputs: dict[str, str]
    tools: dict[str, str]
    host: dict[str, str]

    @property
    def key(self) -> str:
        """Hex sha256 over all ingredients."""
        return sha256_text(canonical_json(asdict(self)))

    @property
    def recipe_digest(self) -> str:
        """Hex sha256 over all ingredients but the host."""
        return sha256_text(canonical_json({**asdict(self), "host": None}))


@dataclass(frozen=True)
class Manifest:
    """The content of a `.manifest.json` file."""

    ingredients: Ingredients
    files: list[FileEntry] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Hex sha256 over path, size, sha256 and executable bit of every file that is not host-measured."""
        return content_digest(self.files)

    @property
    def identity(self) -> str:
        """What a later stage's key holds of this result: the digest.

        Arrays that later stages compute with (`measured*.npz`: logits of the oracle, reference numbers) may differ in
        their last bits from host to host, so they are not in the digest. Of such a result the identity is how it was
        made, so that whoever judges by the arrays is judged anew when they may have changed.
        """
        has_arrays = any(entry.measured and entry.path.endswith(".npz") for entry in self.files)
        return sha256_text(self.digest + self.ingredients.recipe_digest) if has_arrays else self.digest

    def to_json(self) -> dict[str, Any]:
        """The file's JSON content."""
        return {
            "format": FORMAT,
            **asdict(self.ingredients),
            "key": self.ingredients.key,
            "digest": self.digest,
            "files": [asdict(entry) for entry in self.files],
        }


def content_digest(files: Iterable[FileEntry]) -> str:
    """What `Manifest.digest` says of a result with these files."""
    return sha256_text(canonical_json([asdict(entry) for entry in files if not entry.measured]))


def manifest_path(tree: Path) -> Path:
    """The manifest that belongs to a result folder."""
    return tree.with_name(tree.name + SUFFIX)


def tree_path(manifest: Path) -> Path:
    """The result folder that belongs to a manifest."""
    if not manifest.name.endswith(SUFFIX):
        raise UserError(f"{manifest} is not a manifest: its name must end in {SUFFIX}")
    return manifest.with_name(manifest.name.removesuffix(SUFFIX))


def list_files(tree: Path) -> list[FileEntry]:
    """Hash every file of a folder."""
    files = tree_files(tree)
    meter = Meter(f"hash {tree.name}", sum(path.stat().st_size for path in files))
    return [
        FileEntry(
            path=path.relative_to(tree).as_posix(),
            size=path.stat().st_size,
            sha256=sha256_file(path, meter),
            executable=is_executable(path),
        )
        for path in files
    ]


def stamp_files(tree: Path) -> dict[str, list[int]]:
    """Path below the folder -> stamp, for every file."""
    return {path.relative_to(tree).as_posix(): file_stamp(path) for path in tree_files(tree)}


def write_manifest(tree: Path, ingredients: Ingredients) -> Manifest:
    """Hash the finished folder and write its manifest beside it."""
    stamps = stamp_files(tree)
    manifest = Manifest(ingredients, list_files(tree))
    record_manifest(tree, manifest, stamps)
    return manifest


def record_manifest(tree: Path, manifest: Manifest, stamps: dict[str, list[int]]) -> None:
    """Write the manifest of a folder whose files were hashed already, each after its stamp was taken.

    A hard link made since then moved the ctime; where size, inode and mtime changed too, the file is hashed again
    when it is read next.
    """
    now = stamp_files(tree)
    _write_stamp(
        tree, manifest, {path: now[path] for path, stamp in stamps.items() if now[path][:3] == stamp[:3]}
    )
    write_json(manifest_path(tree), manifest.to_json())


def read_manifest(path: Path) -> Manifest:
    """Parse a manifest and check that its own digest and key fit its content.

    Raises UserError where the file is missing, is no manifest of this format, or was edited.
    """
    try:
        return parse_manifest(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: the result it describes was not built") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is not a readable manifest ({problem}): delete it and run again") from None


def parse_manifest(text: str) -> Manifest:
    """A manifest from its file's text; ValueError, KeyError or TypeError where it is none or was edited."""
    raw = json.loads(text)
    ingredients = Ingredients(**{name: raw[name] for name in Ingredients.__dataclass_fields__})
    manifest = Manifest(ingredients, [FileEntry(**entry) for entry in raw["files"]])
    if (raw["format"], raw["digest"], raw["key"]) != (FORMAT, manifest.digest, ingredients.key):
        raise ValueError("it was edited: its digest does not fit its content")
    return manifest


def verify_tree(path: Path) -> Manifest:
    """Check a result against its manifest before it is read, and return the manifest.

    Every file is hashed, except where size, inode, mtime and ctime equal the local stamp that was taken when the
    file was hashed last, so that gigabytes are not read again and again. Raises UserError naming the file.
    """
    manifest = read_manifest(path)
    stamps = check_tree(manifest, path)
    if stamps != _read_stamp(tree_path(path), manifest):
        _write_stamp(tree_path(path), manifest, stamps)
    return manifest


def forget_damaged(results: Path) -> list[str]:
    """Delete the manifest of every result below a folder that is not whole any more; returns what was wrong.

    Snakemake looks at manifests only: without this, a deleted or altered result counts as up to date. Files are
    hashed only where size or mtime are not as they were when they were hashed last.
    """
    wrong = []
    for path in sorted(results.rglob(f"*{SUFFIX}")):
        try:
            _glance(read_manifest(path), path)
        except UserError as problem:
            wrong.append(str(problem).partition(";")[0])
            path.unlink(missing_ok=True)
    return wrong


def _glance(manifest: Manifest, path: Path) -> None:
    """Raise UserError where a file of a result is missing or not what it was."""
    tree, known = tree_path(path), _read_stamp(tree_path(path), manifest)
    for entry in manifest.files:
        file = tree / entry.path
        if not file.is_file():
            raise UserError(f"{file} is missing")
        size, _, mtime, _ = file_stamp(file)
        untouched = entry.path in known and known[entry.path][2] == mtime
        if size != entry.size or (not untouched and sha256_file(file) != entry.sha256):
            raise UserError(f"{file} is not what was built")


def check_tree(manifest: Manifest, path: Path) -> dict[str, list[int]]:
    """What `verify_tree` checks, without writing the stamp: it returns the stamps of the files."""
    tree = tree_path(path)
    found = {file.relative_to(tree).as_posix(): file for file in tree_files(tree)} if tree.is_dir() else {}
    listed = {entry.path for entry in manifest.files}
    advice = f"delete {path} and run again to rebuild it"
    for stray in sorted(found.keys() - listed):
        raise UserError(f"{tree / stray} is not part of the result that {path.name} describes; {advice}")
    known, stamps = _read_stamp(tree, manifest), {}
    for entry in manifest.files:
        file = found.get(entry.path)
        if file is None:
            raise UserError(f"{tree / entry.path} is missing; {advice}")
        stamps[entry.path] = file_stamp(file)
        if known.get(entry.path) == stamps[entry.path]:
            continue
        if file.stat().st_size != entry.size or sha256_file(file) != entry.sha256:
            raise UserError(f"{file} is not what was built: its bytes changed; {advice}")
    return stamps


def _stamp_path(tree: Path) -> Path:
    return tree.with_name(f".{tree.name}.stamp.json")


def _write_stamp(tree: Path, manifest: Manifest, stamps: dict[str, list[int]]) -> None:
    write_atomic(_stamp_path(tree), json.dumps({"of": _hashes(manifest), "stamps": stamps}))


def _read_stamp(tree: Path, manifest: Manifest) -> dict[str, list[int]]:
    """The stamps that were taken of exactly these hashes; none where they were of others, or the file is damaged."""
    try:
        record = json.loads(_stamp_path(tree).read_text(encoding="utf-8"))
        return dict(record["stamps"]) if record["of"] == _hashes(manifest) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # everything is hashed again, which is always right


def _hashes(manifest: Manifest) -> str:
    return sha256_text(canonical_json([[entry.path, entry.sha256] for entry in manifest.files]))
