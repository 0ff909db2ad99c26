"""What results, the store and a release hold on the disk, together and apart.

Results are shared by hard link or clone wherever they can be (`files.place_file`, `store/blobs.py`), so a sum of file
sizes says little. Counted are: that sum; the *unique* content, every sha256 once, by the manifests and the names of
the store's blobs; and what is *held*: the blocks of every inode once. A clone has an inode of its own and shares its
blocks where nobody sees it, so on a file system that clones the figure of what is held is too high.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.manifest import SUFFIX, Manifest, read_manifest, tree_path

_BLOCK = 512  # bytes in the unit of st_blocks, whatever the file system's own block is
_CLONING = {"apfs", "btrfs", "xfs", "bcachefs", "zfs", "ocfs2", "overlay"}

RELEASE, RESULTS, STORE, STORED_ELSE, LEFT = (
    "release",
    "other results",
    "store, of these results",
    "store, of anything else",
    "unfinished: at work, or killed",
)


@dataclass(frozen=True)
class File:
    """A file: bytes, its inode, the bytes of its blocks, and what its content is known by."""

    path: Path
    size: int
    inode: tuple[int, int]
    held: int
    content: str


@dataclass
class Sum:
    """Files counted together."""

    files: int = 0
    size: int = 0
    unique: dict[str, int] = field(default_factory=dict)
    held: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, file: File) -> None:
        """Count one more."""
        self.files += 1
        self.size += file.size
        self.unique[file.content] = file.size
        self.held[file.inode] = file.held

    @property
    def unique_size(self) -> int:
        """Bytes of the content, each once."""
        return sum(self.unique.values())

    @property
    def held_size(self) -> int:
        """Bytes of the blocks, each inode once."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Copies:
    """A content that lies in more than one inode."""

    size: int
    paths: list[Path]  # one of each inode

    @property
    def extra(self) -> int:
        """Bytes that one copy would save."""
        return self.size * (len(self.paths) - 1)


@dataclass(frozen=True)
class Disk:
    """What is held: the parts, all of them together, and content that is held more than once, the largest first."""

    parts: dict[str, Sum]
    together: Sum
    copies: list[Copies]

    @property
    def ratio(self) -> float:
        """Held over unique bytes: 1.0 where nothing is held twice."""
        return self.together.held_size / max(self.together.unique_size, 1)


def measure(results: Path, built: dict[Path, Manifest], store: Path | None) -> Disk:
    """Look at one model's results, and at the store folder (its version's root) if there is one.

    `built` has the path and content of every manifest of the results.
    """
    known = {
        tree_path(path) / entry.path: entry.sha256
        for path, content in built.items()
        for entry in content.files
    }
    parts = {name: Sum() for name in (RELEASE, RESULTS, STORE, STORED_ELSE, LEFT)}
    together = Sum()
    places: dict[str, dict[tuple[int, int], Path]] = {}
    ours = set(known.values())
    for name, file in _classified(results, store, known, ours):
        parts[name].add(file)
        together.add(file)
        places.setdefault(file.content, {})[file.inode] = file.path
    copies = [
        Copies(together.unique[content], list(inodes.values()))
        for content, inodes in places.items()
        if len(inodes) > 1
    ]
    return Disk(parts, together, sorted(copies, key=lambda one: (-one.extra, one.paths)))


def hides_clones(folder: Path) -> bool:
    """Whether the file system of a folder can share blocks between inodes, which nothing here sees."""
    if sys.platform == "darwin":
        return True
    import psutil  # costs more than the rest of a short command

    place = folder.resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[up] for up in (place, *place.parents) if up in mounts), "") in _CLONING


def manifests(results: Path) -> Iterator[tuple[Path, Manifest]]:
    """Path and content of the manifest of every finished result of a model; an unreadable one is left out."""
    for path in sorted(results.rglob(f"*{SUFFIX}")):
        if not _unfinished(path.relative_to(results).parts):
            try:
                yield path, read_manifest(path)
            except UserError:
                continue


def _classified(
    results: Path, store: Path | None, known: dict[Path, str], ours: set[str]
) -> Iterator[tuple[str, File]]:
    for file in _files(results, known):
        inner = file.path.relative_to(results).parts
        yield LEFT if _unfinished(inner) else RELEASE if inner[0] == "release" else RESULTS, file
    if store is None:
        return
    for file in _files(store, {}):
        inner = file.path.relative_to(store).parts
        if inner[0] == "tmp":
            yield LEFT, file
        elif inner[0] == "blobs":
            blob = replace(file, content=file.path.name)
            yield STORE if blob.content in ours else STORED_ELSE, blob
        else:
            yield STORED_ELSE, file


def _unfinished(parts: tuple[str, ...]) -> bool:
    return any(".tmp-" in part for part in parts)  # the form of the names in `files.py`


def _files(folder: Path, known: dict[Path, str]) -> Iterator[File]:
    """Every file below a folder; one whose content nobody knows counts by its inode."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            try:
                status = path.lstat()
            except FileNotFoundError:  # a build goes on meanwhile
                continue
            inode = status.st_dev, status.st_ino
            content = known.get(path, f"inode {inode}")
            yield File(path, status.st_size, inode, status.st_blocks * _BLOCK, content)
