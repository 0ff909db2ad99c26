"""The one place that writes files: atomically, durably, with the same bytes on every host."""

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FICLONE = 0x40049409  # Linux ioctl: share the blocks of another file (btrfs, xfs, overlay on them)


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's bytes, read in a stream."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Hex sha256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys, two-space indent and a final newline: equal values give equal bytes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` so that `path` holds either its old content or all of the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.tmp-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)  # mkstemp makes 0600; results are read by other users too
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write canonical JSON atomically."""
    write_atomic(path, canonical_json(value))


@contextmanager
def new_tree(final: Path) -> Iterator[Path]:
    """Give an empty folder to fill; at the end of the block it takes `final`'s place in one rename.

    The folder has the final name already (some formats look at it) and lies in a temporary sibling of its own
    process, so neither a killed run nor an orphaned child leaves anything that looks whole.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".tmp-{final.name}-"))
    tree = home / final.name
    tree.mkdir()
    try:
        yield tree
        _settle(tree)
        if final.is_dir():
            final.rename(home / "replaced")
        elif final.exists():
            final.unlink()
        tree.rename(final)
        _fsync_folder(final.parent)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def tree_files(tree: Path) -> list[Path]:
    """All files below `tree`, sorted by their path's text."""
    return sorted(
        (p for p in tree.rglob("*") if not p.is_dir()), key=lambda p: p.relative_to(tree).as_posix()
    )


def place_file(source: Path, target: Path) -> None:
    """Bring a file's content to `target` as cheaply as the file system allows: clone, hard link, else copy.

    A symlink is followed, so the target is always a regular file.
    """
    source = source.resolve(strict=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if _clone(source, target):
        return
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def place_tree(source: Path, target: Path) -> None:
    """Place every file of a folder below `target` (see `place_file`)."""
    for path in tree_files(source):
        place_file(path, target / path.relative_to(source))


def _clone(source: Path, target: Path) -> bool:
    """Copy-on-write clone; False where the platform or file system has none."""
    if not sys.platform.startswith("linux"):
        return False  # macOS: shutil.copyfile below clones on APFS by itself (fcopyfile)
    with source.open("rb") as reader, target.open("wb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return True
        except OSError:
            pass
    target.unlink()
    return False


def _settle(tree: Path) -> None:
    """Give every file and folder its usual mode, whatever the umask, and flush them to disk."""
    for path in [tree, *tree.rglob("*")]:
        if path.is_symlink():
            raise ValueError(f"a result holds a symlink: {path.name}")
        if path.is_dir():
            path.chmod(0o755)
            continue
        if path.stat().st_nlink == 1:  # a hard link shares its mode with the file it was placed from
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    _fsync_folder(tree)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
