"""The one place that writes files: atomically, durably, with the same bytes on every host."""

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workflow_scripts.progress import Meter, working

LINKED_FROM = 16 << 20
"""Bytes from which a file is rather linked than copied where the file system has no clones."""

_BLOCK = 1 << 18  # bytes read at a time
_FICLONE = 0x40049409  # Linux ioctl: share the blocks of another file (btrfs, xfs, overlay on them)


def sha256_file(path: Path, meter: Meter | None = None) -> str:
    """Hex sha256 of a file's bytes, read in a stream; `meter` shows the progress over more files than this one."""
    digest, block = hashlib.sha256(), bytearray(_BLOCK)
    with path.open("rb", buffering=0) as stream:
        meter = meter or Meter(f"hash {path.name}", os.fstat(stream.fileno()).st_size)
        while count := stream.readinto(block):
            digest.update(memoryview(block)[:count])
            meter.add(count)
    return digest.hexdigest()


def file_stamp(path: Path) -> list[int]:
    """Size, inode, mtime and ctime of a file: equal stamps of one path mean an untouched file.

    The ctime is the part that cannot be set back: a write that restores size and mtime still moves it.
    """
    status = path.stat()
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


class HashMemory:
    """sha256 of files of the user's own, remembered with their stamps so that gigabytes are not hashed every time."""

    def __init__(self, path: Path) -> None:
        """`path` is the JSON file of the memory; missing or damaged, everything is hashed, which is always right."""
        self._path = path
        self._seen: dict[str, tuple[list[int], str]] = {}
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            self._known = {name: (list(stamp), str(sha256)) for name, (stamp, sha256) in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            self._known = {}

    def sha256(self, path: Path) -> str:
        """Hex sha256 of a file's bytes; read only if the file is not as remembered."""
        name, stamp = str(path.resolve()), file_stamp(path)
        known_stamp, known = self._known.get(name, (None, ""))
        digest = known if known_stamp == stamp else sha256_file(path)
        self._seen[name] = (stamp, digest)
        return digest

    def save(self, rehashed: dict[int, str]) -> None:
        """Keep what was asked for; `rehashed` maps inodes to what they were hashed to since then.

        A result may hold a hard link of such a file, which moves the ctime: the hash of the result speaks for both.
        """
        for name, (stamp, digest) in list(self._seen.items()):
            now = file_stamp(Path(name))
            if now != stamp and rehashed.get(now[1]) == digest:
                self._seen[name] = (now, digest)
        if self._seen and self._seen != self._known:
            write_atomic(self._path, json.dumps(self._seen))


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
    """Give an empty folder to fill; at the end of the block it takes `final`'s place by rename.

    The folder has the final name already (some formats look at it) and lies in a temporary sibling of its own
    process, so neither a killed run nor an orphaned child leaves anything that looks whole.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".tmp-{final.name}-"))
    tree = home / final.name
    tree.mkdir()
    try:
        yield tree
        with working(f"flush {final.name} to the disk"):
            _settle(tree)
        if final.is_dir():
            final.rename(home / "replaced")
        elif final.exists():
            final.unlink()
        tree.rename(final)
        _fsync_folder(final.parent)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@contextmanager
def alone(lock: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file that one process at a time can hold; `waiting` is called if another one has it.

    The operating system frees it when its holder ends, however that happens, so there is no stale lock.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def remove_stale_siblings(final: Path) -> None:
    """Delete what killed runs left of `new_tree(final)`; call it where no other process can be filling one."""
    leftover = re.compile(rf"\.tmp-{re.escape(final.name)}-[a-z0-9_]{{8}}")  # the form of mkdtemp's names
    for path in final.parent.glob(f".tmp-{glob.escape(final.name)}-*"):
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def tree_files(tree: Path) -> list[Path]:
    """All files below `tree`, sorted by their path's text."""
    return sorted(
        (p for p in tree.rglob("*") if not p.is_dir()), key=lambda p: p.relative_to(tree).as_posix()
    )


def place_file(source: Path, target: Path) -> None:
    """Bring a file's content to `target` as cheaply as is safe: clone; for large files hard link; else copy.

    A symlink is followed, so the target is always a regular file. Small files are copied, so that who edits a
    released tokenizer does not edit the checkpoint it came from. An executable is copied without that mode.
    """
    source = source.resolve(strict=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    if clone_file(source, target):
        target.chmod(0o644)
        return
    if source.stat().st_size >= LINKED_FROM and not is_executable(source):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without hard links
            pass
    copy_file(source, target)


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes, with progress where there are many."""
    with source.open("rb", buffering=0) as reader, target.open("wb") as writer:
        meter = Meter(f"copy {target.name}", os.fstat(reader.fileno()).st_size)
        while block := reader.read(_BLOCK):
            writer.write(block)
            meter.add(len(block))


def place_tree(source: Path, target: Path) -> None:
    """Place every file of a result below `target` (see `place_file`); executables stay executable."""
    for path in tree_files(source):
        place_file(path, target / path.relative_to(source))
        if is_executable(path):
            (target / path.relative_to(source)).chmod(0o755)


def is_executable(path: Path) -> bool:
    """Whether a file's owner may execute it."""
    return bool(path.stat().st_mode & 0o100)


def clone_file(source: Path, target: Path) -> bool:
    """Copy-on-write clone to a path where nothing is yet; False where the platform or file system has none."""
    if sys.platform == "darwin":
        import ctypes  # clonefile(2) has no wrapper in Python; only needed here

        return ctypes.CDLL(None).clonefile(os.fsencode(source), os.fsencode(target), 0) == 0
    if not sys.platform.startswith("linux"):
        return False
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
            _fsync_folder(path)
            continue
        if path.stat().st_nlink == 1:  # a hard link shares its mode with the file it was placed from
            mode = 0o755 if is_executable(path) else 0o644
            if (
                path.stat().st_mode & 0o7777 != mode
            ):  # a needless chmod would move the ctime, which stamps go by
                path.chmod(mode)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    _fsync_folder(tree)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
