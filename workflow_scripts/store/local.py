"""The first level of the store: a folder on this machine.

    entries/<key>.json       what a result was: its manifest, under a checksum; written last
    blobs/ab/<sha256>        its files (see `blobs.py`)
    stamps/ab/<sha256>       size, inode, mtime and ctime of a large blob when it was last known to be right
    used/<key>               an empty file whose mtime says when the entry was last served or put
    tmp/                     unfinished files

Readers and writers share a lock, `prune` and repairs hold it alone: so nothing is deleted under a reader, and no blob
whose entry is about to be written is taken for garbage. The lock dies with its process.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from workflow_scripts.files import canonical_json, sha256_text, write_atomic
from workflow_scripts.manifest import FileEntry, Ingredients, Manifest, parse_manifest
from workflow_scripts.store.blobs import Blobs
from workflow_scripts.store.errors import Damaged, StoreTrouble

VERSION = "v1"  # of this layout; another version lies beside it


@dataclass(frozen=True)
class Entry:
    """One stored result; times in seconds since 1970."""

    manifest: Manifest
    stored: float
    used: float

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.manifest.files)


class LocalStore:
    """A store folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / VERSION
        self.blobs = Blobs(self.root)

    def read(self, key: str) -> Manifest | None:
        """The manifest of an entry; None if there is none. Raises Damaged, StoreTrouble."""
        try:
            record = self.entry_path(key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as problem:
            raise StoreTrouble(problem.strerror) from problem
        except ValueError:
            raise Damaged("its record is not text") from None
        return parse_record(record, key)

    def find(self, ingredients: Ingredients) -> Manifest | None:
        """The manifest of an entry whose files are all there (their bytes are checked when they are served)."""
        with suppress(Damaged, StoreTrouble):
            found = self.read(ingredients.key)
            if found and all(self.blobs.has(entry) for entry in found.files):
                return found
        return None

    def fetch(self, ingredients: Ingredients, out: Path) -> list[FileEntry] | None:
        """Fill the empty folder `out` with the stored result, checked; None if there is no entry.

        Raises Damaged, with the entry dropped and `out` empty again, if it is not what was put there; StoreTrouble
        if the folder cannot be read; OSError only if `out` cannot be written.
        """
        with self.lock():
            try:
                found = self.read(ingredients.key)
                if found is None:
                    return None
                for entry in found.files:
                    self._give(entry, out)
            except Damaged:
                self._drop_entry(ingredients.key)
                shutil.rmtree(out)
                out.mkdir()
                raise
            with suppress(OSError):  # a store that can only be read
                self._mark_used(ingredients.key)
        return found.files

    def put(self, manifest: Manifest, tree: Path, stamps: dict[str, list[int]]) -> dict[str, list[int]]:
        """Keep a finished result; `stamps` were taken before its files were hashed for the manifest.

        Returns the stamps of those files of the result that gave way to stored ones with the same bytes. Raises
        NotStored, Damaged or StoreTrouble, and OSError for the file system's reasons.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with self.lock():
            united = {
                entry.path: self.blobs.add(tree / entry.path, entry, stamps.get(entry.path))
                for entry in manifest.files
            }
            self.write_entry(manifest)
        return {path: stamp for path, stamp in united.items() if stamp}

    def write_entry(self, manifest: Manifest) -> None:
        """Write the record of a result whose blobs are all there."""
        key = manifest.ingredients.key
        write_atomic(self.entry_path(key), record_of(manifest))
        self._mark_used(key)

    def entries(self) -> Iterator[Entry]:
        """All readable entries, the newest first."""
        found = []
        for path in (self.root / "entries").glob("*.json"):
            with suppress(Damaged, StoreTrouble, FileNotFoundError):
                manifest = self.read(path.stem)
                stored = path.stat().st_mtime
                if manifest:
                    found.append(Entry(manifest, stored, self._last_used(path.stem, stored)))
        yield from sorted(found, key=lambda entry: (-entry.stored, entry.manifest.ingredients.key))

    def unique_size(self) -> int:
        """Bytes of all blobs."""
        return sum(self.blobs.path(digest).stat().st_size for digest in self.blobs.digests())

    def prune(self, keep: list[Entry]) -> None:
        """Delete all entries but those of `keep`, and every blob that none of them needs; call it under `lock`."""
        kept = {entry.manifest.ingredients.key for entry in keep}
        needed = {file.sha256 for entry in keep for file in entry.manifest.files}
        for path in list((self.root / "entries").glob("*")):
            if path.stem not in kept or path.suffix != ".json":
                self._drop_entry(path.stem)
                path.unlink(missing_ok=True)
        for digest in self.blobs.digests():
            if digest not in needed:
                self.blobs.drop(digest)
        self.blobs.clean()

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Key and trouble of every entry that could not be served; hashes everything, whatever the stamps say.

        A blob that no entry needs has the key `-`.
        """
        wrong = {digest for digest in self.blobs.digests() if not self.blobs.is_right(digest)}
        unused = set(wrong)
        for path in sorted((self.root / "entries").glob("*.json")):
            try:
                manifest = self.read(path.stem)
            except Damaged as problem:
                yield path.stem, str(problem)
                continue
            for file in manifest.files if manifest else []:
                unused.discard(file.sha256)
                if not self.blobs.has(file):
                    yield path.stem, f"{file.path}: blob {file.sha256[:12]} is missing or cut short"
                elif file.sha256 in wrong:
                    yield path.stem, f"{file.path}: the bytes of blob {file.sha256[:12]} changed"
        for digest in sorted(unused):
            yield "-", f"the bytes of blob {digest[:12]} changed"

    def repair(self) -> None:
        """Delete what is damaged and what no whole entry needs; call it under `lock`."""
        wrong = {key for key, _ in self.damaged()}
        self.prune([entry for entry in self.entries() if entry.manifest.ingredients.key not in wrong])

    @contextmanager
    def lock(self, alone: bool = False) -> Iterator[None]:
        """Hold the store, together with other readers and writers or alone."""
        try:
            handle = os.open(self.root, os.O_RDONLY)
        except FileNotFoundError:
            yield  # there is nothing yet to hold
            return
        except OSError as problem:
            raise StoreTrouble(problem.strerror) from problem
        try:
            with suppress(OSError):  # a network folder without locks: what is served is checked anyway
                fcntl.flock(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield
        finally:
            os.close(handle)

    def entry_path(self, key: str) -> Path:
        """Where the record of a key lies."""
        return self.root / "entries" / f"{key}.json"

    def _give(self, entry: FileEntry, out: Path) -> None:
        try:
            self.blobs.give(entry, out / entry.path)
        except Damaged:
            with suppress(OSError):
                self.blobs.drop(entry.sha256)
            raise

    def _drop_entry(self, key: str) -> None:
        with suppress(OSError):
            self.entry_path(key).unlink(missing_ok=True)
            self._used_path(key).unlink(missing_ok=True)

    def _used_path(self, key: str) -> Path:
        return self.root / "used" / key

    def _mark_used(self, key: str) -> None:
        path = self._used_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def _last_used(self, key: str, stored: float) -> float:
        try:
            return self._used_path(key).stat().st_mtime
        except OSError:
            return stored


def record_of(manifest: Manifest) -> str:
    """Text of an entry's record: the manifest and a checksum over all of it, host-measured files included."""
    content = manifest.to_json()
    return canonical_json({"manifest": content, "sha256": sha256_text(canonical_json(content))})


def parse_record(record: str, key: str) -> Manifest:
    """The manifest in a record of the given key; raises Damaged."""
    try:
        raw = json.loads(record)
        text = canonical_json(raw["manifest"])
        manifest = parse_manifest(text)
    except (ValueError, KeyError, TypeError) as problem:
        raise Damaged(f"its record is not readable ({problem})") from None
    if raw.get("sha256") != sha256_text(text) or manifest.ingredients.key != key:
        raise Damaged("its record was changed")
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Damaged(f"its record names a file outside of the result: {file.path}")
        if len(file.sha256) != 64 or not set(file.sha256) <= set("0123456789abcdef"):
            raise Damaged(f"its record holds no sha256 for {file.path}")
    return manifest
