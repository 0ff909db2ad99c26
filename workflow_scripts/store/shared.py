"""The second level of the store: any fsspec URL that a team or its CI shares, such as `s3://bucket/store`.

The same layout as the local folder, without stamps and use. An upload goes to a temporary name first; the record of
an entry is written last, so a reader never sees half a result. Whatever comes back is hashed before it is used.
"""

import contextlib
import uuid
from typing import Any

from workflow_scripts.manifest import Ingredients, Manifest
from workflow_scripts.store.errors import Damaged
from workflow_scripts.store.local import VERSION, LocalStore, parse_record, record_of


class SharedStore:
    """A store behind a URL. Methods raise whatever its fsspec file system raises."""

    def __init__(self, url: str) -> None:
        self.url = url

    def find(self, ingredients: Ingredients) -> Manifest | None:
        """The manifest of an entry; None if there is none. Raises Damaged."""
        system, root = self._open()
        try:
            record = system.cat_file(_entry(root, ingredients.key))
        except FileNotFoundError:
            return None
        try:
            return parse_record(record.decode(), ingredients.key)
        except UnicodeDecodeError:
            raise Damaged("its record is not text") from None

    def pull(self, ingredients: Ingredients, local: LocalStore) -> bool:
        """Bring an entry to the local folder; False if there is none. Raises Damaged, with the bad file deleted."""
        found = self.find(ingredients)
        if found is None:
            return False
        system, root = self._open()
        local.root.mkdir(parents=True, exist_ok=True)
        with local.lock():
            for entry in found.files:
                if local.blobs.has(entry):
                    continue
                unfinished = local.blobs.new_file()
                try:
                    system.get_file(_blob(root, entry.sha256), str(unfinished))
                    local.blobs.adopt(unfinished, entry)
                except Damaged:
                    for path in (_entry(root, ingredients.key), _blob(root, entry.sha256)):
                        with contextlib.suppress(Exception):  # a reader may have no right to delete
                            system.rm_file(path)
                    raise
                finally:
                    unfinished.unlink(missing_ok=True)
            local.write_entry(found)
        return True

    def push(self, manifest: Manifest, local: LocalStore) -> None:
        """Upload an entry of the local folder; what is there already is not sent again."""
        system, root = self._open()
        with local.lock():
            for entry in manifest.files:
                blob = _blob(root, entry.sha256)
                if not system.exists(blob):
                    self._upload(system, root, local.blobs.path(entry.sha256).as_posix(), blob)
        temporary = _temporary(root)
        _make_parents(system, temporary)
        system.pipe_file(temporary, record_of(manifest).encode())
        _move(system, temporary, _entry(root, manifest.ingredients.key))

    def _open(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # only who shares a store pays for this import

        system, path = url_to_fs(self.url)
        return system, f"{path.rstrip('/')}/{VERSION}"

    def _upload(self, system: Any, root: str, source: str, target: str) -> None:
        temporary = _temporary(root)
        _make_parents(system, temporary)
        try:
            system.put_file(source, temporary)
            _move(system, temporary, target)
        except BaseException:
            with contextlib.suppress(Exception):
                system.rm_file(temporary)
            raise


def _entry(root: str, key: str) -> str:
    return f"{root}/entries/{key}.json"


def _blob(root: str, sha256: str) -> str:
    return f"{root}/blobs/{sha256[:2]}/{sha256}"


def _temporary(root: str) -> str:
    return f"{root}/tmp/{uuid.uuid4().hex}"


def _make_parents(system: Any, path: str) -> None:
    system.makedirs(path.rpartition("/")[0], exist_ok=True)


def _move(system: Any, source: str, target: str) -> None:
    _make_parents(system, target)
    system.mv(source, target)
