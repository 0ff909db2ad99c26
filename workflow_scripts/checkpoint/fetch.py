"""Getting the checkpoint: a local folder, or a pinned commit of a Hugging Face repository."""

import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.needed import COMPANIONS, CONFIG, LOCAL, REHEARSAL, TOKENIZER, WEIGHTS
from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL

_SCHEME = "hf://"
_ADDRESS = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)@(?P<revision>[^@\s]+)")
_QUIET_SECONDS = 5.0  # between two lines of progress
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ONLINE = "run once with the network (HF_HUB_OFFLINE unset) to complete the local copy"


@dataclass(frozen=True)
class Fetched:
    """The folder with the published files, and a host-independent identity of where they come from."""

    folder: Path
    identity: dict[str, str]


def fetch(source: str, local: Path | None, allow_moving_revision: bool) -> Fetched:
    """Resolve a checkpoint source.

    `source` is `hf://owner/name@commit`; with anything else, "local" or "rehearsal", the folder comes as `local`. A
    branch or tag instead of the 40-digit commit needs `allow_moving_revision`; the commit that it meant is recorded.
    Raises UserError that says what to do.
    """
    if not source.startswith(_SCHEME):
        if local is None:
            raise UserError(f"`source` {source} is no hf:// address, and no folder came with it as an input")
        return Fetched(local, {"kind": REHEARSAL if source == REHEARSAL else LOCAL})
    if local is not None:
        raise UserError(f"{source} is fetched from the Hub: it takes no local folder")
    match = _ADDRESS.fullmatch(source)
    if match is None:
        raise UserError(f"{source} is not a checkpoint address: write hf://owner/name@<40-digit commit>")
    repository, revision = match["repository"], match["revision"]
    if not _COMMIT.fullmatch(revision) and not allow_moving_revision:
        raise UserError(
            f"{source}: `{revision}` is no 40-digit commit (lower-case hex), and branches and tags move; pin the "
            "commit (model page, Files, History), or set allow_moving_revision: true"
        )
    folder = _download(repository, revision)
    return Fetched(folder, {"kind": "huggingface", "repository": repository, "commit": folder.name})


def _download(repository: str, revision: str) -> Path:
    """Fetch the needed files into the local Hub cache, or take them from it; returns the commit's folder.

    A complete cached commit needs neither network nor token. Messages and logs carry no address of a request, since
    those can hold signatures and names of mirrors.
    """
    import httpx2  # the Hub client's own HTTP library; both are slow to import and not needed for a folder
    from huggingface_hub import errors, snapshot_download

    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    where = f"{repository}@{revision}"
    patterns = [*COMPANIONS, *WEIGHTS]
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, tqdm_class=_transfer_lines()
        )
    except errors.LocalEntryNotFoundError as problem:
        state = "incomplete" if isinstance(problem, errors.IncompleteSnapshotError) else "not there"
        raise UserError(
            f"{where}: the local copy is {state}, and {_advice(problem.__cause__, repository)}"
        ) from None
    except (errors.HfHubHTTPError, httpx2.HTTPError, ConnectionError, TimeoutError) as problem:
        raise UserError(f"{where}: {_advice(problem, repository)}") from None
    except errors.HFValidationError:
        raise UserError(f"{where} is not a valid repository name: write hf://owner/name@commit") from None
    return _complete(Path(folder), where)


def _advice(problem: BaseException | None, repository: str) -> str:
    """What a failure of the Hub client means, and what to do about it."""
    from huggingface_hub import errors

    log_in = f"accept the licence on the model page of {repository}, then run `hf auth login` on this host"
    status = problem.response.status_code if isinstance(problem, errors.HfHubHTTPError) else None
    match problem:
        case errors.GatedRepoError():
            return f"access is not granted (gated repository): {log_in}"
        case errors.RevisionNotFoundError():
            return "the repository has no such revision: correct the commit in `source`"
        case errors.RepositoryNotFoundError():
            return f"there is no such repository, or it is not visible without login: check its name, or {log_in}"
        case errors.HfHubHTTPError() if status in (401, 403):
            return f"access is refused (HTTP {status}): {log_in}"
        case errors.HfHubHTTPError():
            return f"the Hub answered with HTTP {status}: run again later; what was fetched is kept"
        case errors.OfflineModeIsEnabled() | None:
            return f"the Hub client is offline: {_ONLINE}"
        case _:
            return f"the network failed ({type(problem).__name__}): run again later; what was fetched is kept"


def _complete(folder: Path, where: str) -> Path:
    """A cache that other tools filled may hold part of a commit, and offline nothing else tells."""
    if missing := [name for name in (CONFIG, TOKENIZER) if not (folder / name).is_file()]:
        raise UserError(f"{where}: the local copy lacks {', '.join(missing)}: {_ONLINE}")
    return folder


def _transfer_lines() -> type:
    """A progress bar class for the Hub client: terminal lines with the bytes so far instead of a drawn bar."""
    from tqdm import tqdm

    class TransferLines(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._shown = time.monotonic()
            super().__init__(*args, **options)

        def display(self, *_: Any, **__: Any) -> None:
            now = time.monotonic()
            # Two bars count bytes: those received, whose total is only estimated, and those of the finished files.
            if (
                self.unit == "B"
                and self.desc.startswith("Reconstruct")
                and now - self._shown >= _QUIET_SECONDS
            ):
                self._shown = now
                TERMINAL.info("fetched %.2f of %.2f GB", self.n / 1e9, (self.total or 0) / 1e9)

    return TransferLines
