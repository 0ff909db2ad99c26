"""The file system behind a shared store's URL, and all that differs between object storage and folders.

On object storage a PUT shows an object whole or not at all, and there is no rename: a copy would send or bill every
byte twice. So a file goes straight to its place. In a folder (file, sftp) it gets a temporary name first.

Only who shares a store pays for the import of this module.
"""

import contextlib
import uuid
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs

from workflow_scripts.progress import Meter

_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs"}
_S3 = {"s3", "s3a"}
# A dead address costs 10 s (two attempts to connect), one that takes requests and never answers 80 s (two requests,
# each sent twice). No listing is cached: another host may have changed the bucket since. One stream a download, which
# is continued where its connection broke.
_S3_OPTIONS = {
    "use_listings_cache": False,
    "max_concurrency": 1,
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 20,
        "retries": {"mode": "standard", "total_max_attempts": 2},
    },
}
_S3_REQUESTS = 2
# Parts of an upload that are in memory at a time, 64 MiB; S3 takes 10,000 parts, so files up to 160 GiB.
_S3_UPLOAD = {"chunksize": 16 * 2**20, "max_concurrency": 4}


class Remote:
    """A folder or prefix behind a URL; paths are relative to it. Methods raise what its file system raises."""

    def __init__(self, url: str) -> None:
        self._on_s3 = url.partition("://")[0] in _S3
        self._system, path = url_to_fs(url, **(_S3_OPTIONS if self._on_s3 else {}))
        if self._on_s3:
            self._system.retries = _S3_REQUESTS  # the constructor has no such option
        self._root = path.rstrip("/")
        names = self._system.protocol
        self._has_folders = _OBJECT_STORES.isdisjoint([names] if isinstance(names, str) else names)

    def read(self, path: str) -> bytes | None:
        """A small file; None if there is none. Raises FileNotFoundError where the whole bucket is missing."""
        try:
            return self._system.cat_file(self._full(path))
        except FileNotFoundError as problem:
            if _is_missing_bucket(problem):
                raise
            return None

    def size(self, path: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return self._system.info(self._full(path))["size"]
        except FileNotFoundError:
            return None

    def download(self, path: str, target: Path, size: int) -> None:
        """Fetch a file of `size` bytes; raises FileNotFoundError if there is none."""
        told = _telling("download from the shared store:", size)
        self._system.get_file(self._full(path), str(target), callback=told)

    def upload(self, source: Path, path: str) -> None:
        """Send a file; nobody sees it before it is whole."""
        told = _telling("upload to the shared store:", source.stat().st_size)
        options = _S3_UPLOAD if self._on_s3 else {}
        self._whole(path, lambda place: self._system.put_file(str(source), place, callback=told, **options))

    def write(self, data: bytes, path: str) -> None:
        """Write a small file; nobody sees it before it is whole."""
        self._whole(path, lambda place: self._system.pipe_file(place, data))

    def delete(self, path: str) -> None:
        """Delete a file."""
        self._system.rm_file(self._full(path))

    def _whole(self, path: str, send: Any) -> None:
        target = self._full(path)
        if not self._has_folders:
            send(target)
            return
        temporary = self._full(f"tmp/{uuid.uuid4().hex}")
        for place in (temporary, target):
            self._system.makedirs(place.rpartition("/")[0], exist_ok=True)
        try:
            send(temporary)
            self._system.mv(temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):
                self._system.rm_file(temporary)
            raise

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"


def _is_missing_bucket(problem: FileNotFoundError) -> bool:
    """A missing object is a miss; a missing bucket is a mistake, which would be a miss for ever."""
    response = getattr(problem.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") == "NoSuchBucket"


def _telling(label: str, size: int) -> Callback:
    """What a file system calls as it goes; long transfers are told on the terminal."""
    meter, told = Meter(label, size), 0

    def tell(_: int | None, done: int, **__: Any) -> None:
        nonlocal told
        meter.add(done - told)
        told = done

    return Callback(hooks={"meter": tell})
