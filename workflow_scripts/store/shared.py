"""The second level of the store: any fsspec URL that a team or its CI shares, such as `s3://bucket/store`.

The same layout as the local folder, without stamps and use. The record of an entry is written last, so a reader never
sees half a result. Whatever comes back is hashed before it is used. Whoever keeps the store in bounds may delete any
file at any time: an entry that has lost one is a miss, and whoever builds its result uploads it again.
"""

import contextlib
import logging
import re
from typing import TYPE_CHECKING

from workflow_scripts.manifest import FileEntry, Ingredients, Manifest
from workflow_scripts.store.errors import Damaged
from workflow_scripts.store.local import VERSION, LocalStore, parse_record, record_of

if TYPE_CHECKING:
    from workflow_scripts.store.remote import Remote

_PASSWORD = re.compile(r"//[^@]*:[^@]*@")
_LOG = logging.getLogger(__name__)


class SharedStore:
    """A store behind a URL. Methods raise whatever its fsspec file system raises."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._damaged: set[str] = set()  # sha256 of objects that came back with other bytes

    def find(self, ingredients: Ingredients) -> Manifest | None:
        """The manifest of an entry; None if there is none. Raises Damaged."""
        return self._find(self._open(), ingredients)

    def pull(self, ingredients: Ingredients, local: LocalStore) -> bool:
        """Bring an entry to the local folder; False if there is none, or not all of it.

        Raises Damaged, with the bad file deleted where this host may; `push` replaces it in any case.
        """
        remote = self._open()
        found = self._find(remote, ingredients)
        if found is None:
            return False
        local.root.mkdir(parents=True, exist_ok=True)
        with local.lock():
            for entry in found.files:
                if not local.blobs.has(entry) and not self._pull_blob(remote, entry, ingredients, local):
                    _LOG.info("the shared store has lost blob %s of this result", entry.sha256)
                    return False
            local.write_entry(found)
        return True

    def push(self, manifest: Manifest, local: LocalStore) -> None:
        """Upload an entry of the local folder; what is there already is not sent again."""
        remote = self._open()
        with local.lock():
            for entry in manifest.files:
                blob = _blob(entry.sha256)
                if entry.sha256 in self._damaged or remote.size(blob) != entry.size:
                    remote.upload(local.blobs.path(entry.sha256), blob)
        remote.write(record_of(manifest).encode(), _entry(manifest.ingredients.key))

    def _find(self, remote: "Remote", ingredients: Ingredients) -> Manifest | None:
        record = remote.read(_entry(ingredients.key))
        if record is None:
            return None
        try:
            return parse_record(record.decode(), ingredients.key)
        except UnicodeDecodeError:
            raise Damaged("its record is not text") from None

    def _pull_blob(
        self, remote: "Remote", entry: FileEntry, ingredients: Ingredients, local: LocalStore
    ) -> bool:
        """Bring one file to the local folder; False if the shared store has lost it."""
        unfinished = local.blobs.new_file()
        try:
            remote.download(_blob(entry.sha256), unfinished, entry.size)
            local.blobs.adopt(unfinished, entry)
        except FileNotFoundError as problem:
            if str(local.root) in str(problem.filename):
                raise
            return False
        except Damaged:
            self._damaged.add(entry.sha256)
            for path in (_entry(ingredients.key), _blob(entry.sha256)):
                with contextlib.suppress(Exception):  # a reader may have no right to delete
                    remote.delete(path)
            raise
        finally:
            unfinished.unlink(missing_ok=True)
        return True

    def _open(self) -> "Remote":
        from workflow_scripts.store.remote import Remote  # only who shares a store pays for this import

        return Remote(f"{self.url.rstrip('/')}/{VERSION}")


def holds_password(url: str) -> bool:
    """Whether a URL has the form `//user:password@`: it would end in logs and process lists."""
    return bool(_PASSWORD.search(url))


def _entry(key: str) -> str:
    return f"entries/{key}.json"


def _blob(sha256: str) -> str:
    return f"blobs/{sha256[:2]}/{sha256}"
