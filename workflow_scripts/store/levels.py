"""What the stage runner asks: a local folder, behind it perhaps a shared one; trouble is said, never raised.

Where they are: the environment (GEMMA4_STORE, GEMMA4_STORE_SHARED) goes over the arguments of a command, which the
rules take from the config; without either the local one lies in the user's cache folder. `off` disables both levels.
"""

import logging
import os
import re
import sys
from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.manifest import FileEntry, Ingredients, Manifest
from workflow_scripts.progress import TERMINAL
from workflow_scripts.store.errors import Damaged, NotStored, StoreTrouble
from workflow_scripts.store.local import LocalStore
from workflow_scripts.store.shared import SharedStore, holds_password

OFF = "off"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOGIN = re.compile(r"//[^/\s]*@")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")  # what an error of a library may quote
_LOG = logging.getLogger(__name__)


class Store:
    """Both levels. The first trouble of a level is said in one line, and the level is left alone from then on."""

    def __init__(self, local: LocalStore, shared: SharedStore | None) -> None:
        self.local = local
        self.shared = shared
        self._failed: set[str] = set()

    def find(self, ingredients: Ingredients) -> Manifest | None:
        """The manifest of a stored result, without fetching it."""
        if not is_repeatable(ingredients):
            return None
        found = self.local.find(ingredients)
        if found is None and self.shared and "shared" not in self._failed:
            try:
                found = self.shared.find(ingredients)
            except Damaged as problem:  # of this entry alone; a run that meets it says so
                _LOG.warning("damaged entry %s of the shared store: %s", ingredients.key, problem)
            except Exception as problem:  # each fsspec file system has its own errors
                self._fail("shared", problem)
        return found

    def fetch(self, ingredients: Ingredients, out: Path) -> list[FileEntry] | None:
        """Fill the empty folder `out` with a stored result, every byte checked; None leaves it empty.

        Raises OSError only where `out` cannot be written.
        """
        if not is_repeatable(ingredients):
            return None
        files = self._fetch_local(ingredients, out)
        if files is None and self._pull(ingredients):
            files = self._fetch_local(ingredients, out)
        return files

    def put(self, manifest: Manifest, tree: Path, stamps: dict[str, list[int]]) -> dict[str, list[int]]:
        """Keep a finished result; `stamps` were taken before its files were hashed for the manifest.

        Returns the stamps as they are now: a file whose bytes were stored already gives way to the stored one.
        """
        if not is_repeatable(manifest.ingredients):
            _LOG.info("not stored: it depends on what %s is today", manifest.ingredients.params["source"])
            return stamps
        if "local" in self._failed:
            return stamps
        try:
            stamps = stamps | self.local.put(manifest, tree, stamps)
        except NotStored as problem:
            _LOG.info("not stored: %s", problem)
            return stamps
        except (OSError, StoreTrouble, Damaged) as problem:
            self._fail("local", problem)
            return stamps
        if self.shared and "shared" not in self._failed:
            try:
                self.shared.push(manifest, self.local)
            except Exception as problem:
                self._fail("shared", problem)
        return stamps

    def _fetch_local(self, ingredients: Ingredients, out: Path) -> list[FileEntry] | None:
        if "local" in self._failed:
            return None
        try:
            return self.local.fetch(ingredients, out)
        except Damaged as problem:
            self._say_damaged("the store", ingredients, problem)
        except StoreTrouble as problem:
            self._fail("local", problem)
        return None

    def _pull(self, ingredients: Ingredients) -> bool:
        if self.shared is None or self._failed:
            return False
        try:
            return self.shared.pull(ingredients, self.local)
        except Damaged as problem:
            self._say_damaged("the shared store", ingredients, problem)
        except Exception as problem:
            ours = isinstance(problem, StoreTrouble) or str(self.local.root) in str(
                getattr(problem, "filename", None)
            )
            self._fail("local" if ours else "shared", problem)
        return False

    def _say_damaged(self, where: str, ingredients: Ingredients, problem: Damaged) -> None:
        TERMINAL.warning("%s has a damaged entry (%s), which is not used: building again", where, problem)
        _LOG.warning("damaged entry %s of %s: %s", ingredients.key, where, problem)

    def _fail(self, level: str, problem: Exception) -> None:
        self._failed.add(level)
        # An address can hold a password, so it is never shown.
        where = f"store {self.local.folder}" if level == "local" else "shared store"
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        TERMINAL.warning(
            "the %s cannot be used (%s): going on without it", where, _one_line(reason or problem)
        )
        _LOG.warning("the %s cannot be used: %s", where, _one_line(repr(problem)))


def is_repeatable(ingredients: Ingredients) -> bool:
    """Whether the key holds everything the result depends on: a branch of a repository moves, a commit does not."""
    source = ingredients.params.get("source")
    moving = isinstance(source, str) and source.startswith("hf://")
    return not (moving and not _COMMIT.fullmatch(source.rpartition("@")[2]))


def _one_line(text: object) -> str:
    """An error's text for people, without a secret."""
    line = " ".join(str(text).split())
    for secret in filter(None, map(os.environ.get, _SECRETS)):
        line = line.replace(secret, "***")
    return _LOGIN.sub("//***@", line)[:200]


def open_store(folder: str | None, shared: str | None) -> Store | None:
    """The store that the environment, else the arguments, else the defaults name; None if it is off.

    Raises UserError where the address of the shared one holds a password.
    """
    folder = os.environ.get("GEMMA4_STORE") or folder or str(default_folder())
    shared = os.environ.get("GEMMA4_STORE_SHARED") or shared
    if folder == OFF:
        return None
    if shared and holds_password(shared):
        raise UserError(
            "the address of the shared store holds a password: take it out of GEMMA4_STORE_SHARED, and give "
            "credentials in variables of the environment, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    local = LocalStore(Path(folder).expanduser().absolute())
    return Store(local, SharedStore(shared) if shared and shared != OFF else None)


def default_folder() -> Path:
    """The store in the user's cache folder."""
    if sys.platform == "darwin":
        caches = Path("~/Library/Caches").expanduser()
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return caches / "coreai-gemma4" / "store"
