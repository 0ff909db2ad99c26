"""Files of the store, named by the sha256 of their bytes: equal content is kept once.

How a user's edit of a result can never come out of the store again:

- A clone (APFS, btrfs, xfs) or a copy shares nothing with the result. A hard link does: it is the same file. So only
  files from LINK_FROM on are linked, and only where the file system cannot clone; the rest is cloned or copied.
- What is linked is read-only (0444), on both sides, so an editor cannot write into it, only put another file in its
  place, which leaves the store alone. A file that has a writable name elsewhere (a checkpoint that was placed from
  its download folder) is never linked, for that name is the user's own: such a result is not stored.
- Permissions do not bind root, or someone who lifts them first. So nothing is served unchecked. A small file is read
  once, and what was read is hashed and written to the result. A large one is hashed as well, unless size, inode,
  mtime and ctime equal the stamp taken when its bytes were last known to be right: nobody can set a ctime back.
- The store's own hard links move the ctime, so the stamp is carried over them, under these conditions: the stamp held
  right before the link; size, inode and mtime are the same afterwards, so what moved the ctime is the link; and the
  new stamp is taken SETTLE seconds after the link, when the clock of the file system (at most 10 ms a tick) has
  moved on, so that any later write gets another ctime. If one fails, the file is hashed. File systems that count
  whole seconds get no stamp. What is left is a write together with a reset of its mtime, both in the very
  milliseconds of a link: no editor does that, and `store verify` and the check of a release hash everything anyway.
"""

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from pathlib import Path

from workflow_scripts.files import clone_file, copy_file, file_stamp, sha256_file
from workflow_scripts.manifest import FileEntry
from workflow_scripts.store.errors import Damaged, NotStored

LINK_FROM = 16 * 2**20  # bytes; copying less takes about 10 ms (measured), which is not worth a shared file
SETTLE = 0.02  # seconds
_READ_ONLY = 0o444


class Blobs:
    """The files of one local store, below `root`."""

    def __init__(self, root: Path) -> None:
        self._blobs, self._stamps, self._unfinished = root / "blobs", root / "stamps", root / "tmp"

    def path(self, sha256: str) -> Path:
        """Where the file of a digest lies."""
        return self._blobs / sha256[:2] / sha256

    def has(self, entry: FileEntry) -> bool:
        """Whether a file of the right size is there; its bytes are checked when it is served."""
        try:
            return self.path(entry.sha256).stat().st_size == entry.size
        except OSError:
            return False

    def digests(self) -> list[str]:
        """Names of all files, sorted."""
        return sorted(path.name for path in self._blobs.glob("??/*"))

    def new_file(self) -> Path:
        """A path of its own for something unfinished; a killed process leaves it to `clean`."""
        self._unfinished.mkdir(parents=True, exist_ok=True)
        return self._unfinished / uuid.uuid4().hex

    def clean(self) -> None:
        """Delete what killed processes left; only while nobody writes."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def add(self, source: Path, entry: FileEntry, stamp: list[int] | None) -> list[int] | None:
        """Keep a file of a result, hashed as `entry` says when it had `stamp`.

        Large content that is there already, since another key gave the same bytes, is not held twice: the result's
        file gives way to a link or clone of the blob, whose stamp is returned. Raises NotStored if it is large and
        cannot be kept apart from the user's own file, Damaged if its bytes have changed since; OSError for the file
        system's reasons.
        """
        if self.has(entry):
            try:
                return self._unite(source, entry)
            except Damaged:
                self.drop(entry.sha256)  # the result has the right bytes
        unfinished = self.new_file()
        try:
            if entry.size < LINK_FROM:
                unfinished.write_bytes(source.read_bytes())
                right_at = None
            else:
                right_at = _share_known(source, unfinished, stamp)
            self._install(unfinished, entry, right_at)
        finally:
            unfinished.unlink(missing_ok=True)
        return None

    def adopt(self, unfinished: Path, entry: FileEntry) -> None:
        """Take in a finished download; raises Damaged if it is not what the entry says."""
        self._install(unfinished, entry, None)

    def give(self, entry: FileEntry, target: Path) -> None:
        """Bring a checked file to a result; raises Damaged for anything but the right bytes."""
        blob = self.path(entry.sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        if entry.size < LINK_FROM:
            data = _read(blob)
            if hashlib.sha256(data).hexdigest() != entry.sha256:
                raise Damaged(f"the bytes of blob {entry.sha256[:12]} changed")
            target.write_bytes(data)
        else:
            self._give_large(entry, blob, target)
        if target.stat().st_nlink == 1:
            target.chmod(0o755 if entry.executable else 0o644)

    def drop(self, sha256: str) -> None:
        """Delete a file and its stamp."""
        self.path(sha256).unlink(missing_ok=True)
        self._stamp_path(sha256).unlink(missing_ok=True)

    def is_right(self, sha256: str) -> bool:
        """Hash a file, whatever its stamp says."""
        try:
            return sha256_file(self.path(sha256)) == sha256
        except OSError:
            return False

    def _install(self, unfinished: Path, entry: FileEntry, right_at: list[int] | None) -> None:
        """Give a file its place, checked; with the stamp `right_at` its bytes are known to be right."""
        if right_at is None:
            right_at = file_stamp(unfinished)
            if sha256_file(unfinished) != entry.sha256:
                raise Damaged(f"{entry.path} does not have the bytes it should have")
        if unfinished.stat().st_mode & 0o222:
            unfinished.chmod(_READ_ONLY)
        large = entry.size >= LINK_FROM
        if large and unfinished.stat().st_nlink == 1:  # a link was flushed as a part of its result
            _flush(unfinished)
        blob = self.path(entry.sha256)
        blob.parent.mkdir(parents=True, exist_ok=True)
        unfinished.replace(blob)
        if large:
            try:
                self._settle(blob, blob, entry, right_at)
            except Damaged:
                self.drop(entry.sha256)
                raise

    def _give_large(self, entry: FileEntry, blob: Path, target: Path) -> None:
        try:
            before, writable = file_stamp(blob), blob.stat().st_mode & 0o222
        except OSError as problem:
            raise Damaged(f"blob {entry.sha256[:12]}: {problem.strerror}") from None
        try:
            _share(blob, target, may_link=not (entry.executable or writable))
        except FileNotFoundError:
            raise Damaged(f"blob {entry.sha256[:12]} was deleted") from None
        self._settle(blob, target, entry, before if before == self._recall(entry.sha256) else None)

    def _unite(self, source: Path, entry: FileEntry) -> list[int] | None:
        """Put the blob in the place of a large file of a result with the same bytes; None where it stays as it is."""
        blob = self.path(entry.sha256)
        other_names = source.stat().st_nlink > 1
        if entry.size < LINK_FROM or source.samefile(blob) or other_names:
            return None
        unfinished = self.new_file()
        before, writable = file_stamp(blob), blob.stat().st_mode & 0o222
        try:
            if not _share_blocks(blob, unfinished, may_link=not (entry.executable or writable)):
                return None
            known = before if before == self._recall(entry.sha256) else None
            self._settle(blob, unfinished, entry, known)  # nothing unchecked takes the place of what is right
            before = file_stamp(blob)
            if unfinished.stat().st_nlink == 1:
                unfinished.chmod(0o755 if entry.executable else 0o644)
            try:
                unfinished.replace(source)
            except OSError as problem:
                if problem.errno != errno.EXDEV:
                    raise
                return None  # a clone may cross mounts of one file system, a rename may not
            self._settle(blob, source, entry, before)  # the rename moved the ctime of a link
        finally:
            unfinished.unlink(missing_ok=True)
        return file_stamp(source)

    def _settle(self, blob: Path, placed: Path, entry: FileEntry, stamp: list[int] | None) -> None:
        """Make sure of the bytes after a link or rename, and remember the new stamp.

        `stamp` is from right before, if the bytes were known to be right then; else, or if more than the ctime
        has changed since, `placed` is hashed.
        """
        time.sleep(SETTLE)
        now = file_stamp(blob)
        if stamp is None or now[:3] != stamp[:3]:
            if now[0] != entry.size or sha256_file(placed) != entry.sha256:
                raise Damaged(f"the bytes of blob {entry.sha256[:12]} changed")
            stamp, now = now, file_stamp(blob)
            if now[:3] != stamp[:3]:
                raise Damaged(f"blob {entry.sha256[:12]} is being written to")
        self._remember(entry.sha256, now)

    def _remember(self, sha256: str, stamp: list[int]) -> None:
        if stamp[3] % 1_000_000_000 == 0:  # a file system that counts whole seconds
            return
        try:
            unfinished, path = self.new_file(), self._stamp_path(sha256)
            unfinished.write_text(json.dumps(stamp))
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.replace(path)
        except OSError:  # a store that can only be read: hashed every time, which is always right
            return

    def _recall(self, sha256: str) -> list[int] | None:
        try:
            return json.loads(self._stamp_path(sha256).read_text())
        except (OSError, ValueError):
            return None

    def _stamp_path(self, sha256: str) -> Path:
        return self._stamps / sha256[:2] / sha256


def _read(blob: Path) -> bytes:
    try:
        return blob.read_bytes()
    except OSError as problem:
        raise Damaged(f"blob {blob.name[:12]}: {problem.strerror}") from None


def _may_link(source: Path) -> bool:
    """Whether a file of a result can become read-only without taking a user's own file from them."""
    status = source.stat()
    if status.st_nlink > 1 and status.st_mode & 0o222:
        raise NotStored(
            f"{source.name} is a hard link of a file outside of the results, and the file system cannot clone"
        )
    return not status.st_mode & 0o111


def _share_known(source: Path, target: Path, stamp: list[int] | None) -> list[int] | None:
    """Share a file of a result; returns the stamp of the target if its bytes are those the source had at `stamp`."""
    known = file_stamp(source) == stamp
    _share(source, target, may_link=_may_link(source))
    shared = file_stamp(target)
    return shared if known and stamp and file_stamp(source)[:3] == stamp[:3] else None


def _share(source: Path, target: Path, may_link: bool) -> None:
    """Clone, else link if allowed, else copy."""
    if not _share_blocks(source, target, may_link):
        copy_file(source, target)


def _share_blocks(source: Path, target: Path, may_link: bool) -> bool:
    """Clone, else link if allowed; False where neither is possible."""
    if clone_file(source, target):
        return True
    if may_link:
        try:
            os.link(source, target)
            return True
        except OSError:  # another file system, too many links, or none at all
            pass
    return False


def _flush(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
