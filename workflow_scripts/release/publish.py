"""`python -m workflow_scripts publish RELEASE --repo OWNER/NAME [--yes]`: upload a release to the Hugging Face Hub.

One commit holds all of it, so nobody ever sees half a release, and that commit is what apps pin. Before it the large
files are sent group by group; what has arrived stays in the Hub's storage, so an upload that was interrupted goes on
where it was when it is started again. The access token comes from the environment or the Hub client's own file.
"""

import argparse
import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from workflow_scripts.configuration.data import REPOSITORY
from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_file
from workflow_scripts.release.catalog import catalog
from workflow_scripts.release.names import README, RELEASE
from workflow_scripts.release.publish_check import File, Publishable, check
from workflow_scripts.release.readme import human_size

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_GROUP_BYTES = 1 << 28  # what an interruption can cost: files are sent in groups of about so much
_HUBS_OWN = {".gitattributes"}  # the Hub makes it with a repository
_SHOWN = 5
_REFUSED = (
    "the Hub refuses the access token: it is wrong, or was revoked; set HF_TOKEN to a valid one, or run "
    "`hf auth login`"
)


def main(arguments: list[str]) -> int:
    """Check a release and upload it, or say what would be uploaded."""
    parser = argparse.ArgumentParser(
        prog="python -m workflow_scripts publish",
        description="Upload a release to a Hugging Face repository. Without --yes it only says what it would do.",
    )
    parser.add_argument(
        "release", type=Path, help="the release folder, which holds SHA256SUMS and release.json"
    )
    parser.add_argument(
        "--repo", required=True, metavar="OWNER/NAME", help="a model repository; made if there is none"
    )
    parser.add_argument("--yes", action="store_true", help="really upload")
    parser.add_argument(
        "--private", action="store_true", help="a repository that has to be made is made private"
    )
    options = parser.parse_args(arguments)
    if not REPOSITORY.fullmatch(options.repo):
        raise UserError(f"--repo {options.repo} is no repository: write OWNER/NAME")
    from huggingface_hub import HfApi, constants, get_token  # slow to import
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():  # in a log, the groups that are named suffice
        disable_progress_bars()
    token = get_token()
    release = check(options.release, token)
    print(
        f"{len(release.files)} files, {human_size(release.size)}, for {constants.ENDPOINT}/{options.repo}",
        flush=True,
    )
    if not options.yes:
        print("dry run: all checks passed and nothing was sent; with --yes it is uploaded")
        print("(snakemake publish: with --config publish=yes)")
        return 0
    if token is None:
        raise UserError("there is no access token: set HF_TOKEN, or run `hf auth login` on this host")
    commit = upload(release, options.repo, HfApi(token=token), private=options.private)
    print(f"published: {constants.ENDPOINT}/{options.repo}/tree/{commit}")
    print(f"pinned commit: {commit}")
    if entry := catalog(release.document, options.repo, commit):
        print(f"for the catalog of coreai-kit:\n{json.dumps(entry['models'][0], indent=2)}")
    return 0


def upload(release: Publishable, repository: str, api: "HfApi", *, private: bool = False) -> str:
    """Make the release the content of one new commit; returns the commit (40 hex digits).

    Where the repository's head is this release already, that commit is returned. Raises UserError that says what to do;
    then the repository's files are as they were, and a second call sends only what had not arrived.
    """
    from huggingface_hub import CommitOperationAdd

    digest = sha256_file(release.folder / RELEASE)
    with _explained(repository, api.token):
        _check_token(api)
        _check_card(release, api)
        api.create_repo(repository, private=private or None, exist_ok=True)
        head = api.model_info(repository).sha
        additions = [CommitOperationAdd(path, release.folder / path) for path in sorted(release.files)]
        groups = list(_groups(additions))
        for number, group in enumerate(groups, start=1):
            _say(f"sending group {number} of {len(groups)}, from {group[0].path_in_repo} on")
            api.preupload_lfs_files(repository, group, free_memory=False)
        release.check_untouched()
        message = f"Release of {release.document['model']} ({RELEASE} {digest[:12]})"
        commit = api.create_commit(repository, additions, commit_message=message, parent_commit=head).oid
        _check_commit(release, repository, commit, api)
    return commit


def _check_token(api: "HfApi") -> None:
    """Before gigabytes are sent: a token that the Hub knows, and that may write."""
    role = api.whoami().get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UserError(
            "the access token may only read: make one that may write (huggingface.co/settings/tokens)"
        )


def _check_card(release: Publishable, api: "HfApi") -> None:
    """Before gigabytes are sent: a model card that the Hub takes. It would refuse the commit with another one."""
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    asked = {"repoType": "model", "content": (release.folder / README).read_text(encoding="utf-8")}
    answer = get_session().post(
        f"{api.endpoint}/api/validate-yaml", json=asked, headers=build_hf_headers(token=api.token)
    )
    if answer.status_code == 400:
        problems = "; ".join(error["message"] for error in answer.json().get("errors", []))
        raise UserError(
            f"the Hub does not take the head of {README} ({problems or 'it does not say why'}): nothing was sent; its "
            "licence is what the checkpoint's own model card states, the rest is made by release/card.py"
        )
    hf_raise_for_status(answer)


def _groups(additions: list["CommitOperationAdd"]) -> Iterator[list["CommitOperationAdd"]]:
    """Files in runs of about the same size; each run is safe in the Hub's storage before the next one starts."""
    group: list[CommitOperationAdd] = []
    for addition in additions:
        group.append(addition)
        if sum(one.upload_info.size for one in group) >= _GROUP_BYTES:
            yield group
            group = []
    if group:
        yield group


def _check_commit(release: Publishable, repository: str, commit: str, api: "HfApi") -> None:
    """Raise UserError where the commit does not hold exactly the files of the release, byte for byte."""
    from huggingface_hub import RepoFile

    tree = api.list_repo_tree(repository, recursive=True, revision=commit)
    found = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    wrong = [
        path
        for path, file in release.files.items()
        if path not in found or not _is(found[path], release.folder / path, file)
    ]
    if wrong:
        raise UserError(
            f"commit {commit} of {repository} lacks {', '.join(wrong[:_SHOWN])} as released ({len(wrong)} files): does "
            "its .gitignore name them? Do not pin it; remove the .gitignore and run again"
        )
    others = sorted(found.keys() - release.files.keys() - _HUBS_OWN)
    if others:
        _say(
            f"{len(others)} other files stay in {repository}, among them {', '.join(others[:_SHOWN])}; who checks a "
            "download of all of it is told that they are not part of the release"
        )


def _is(remote: "RepoFile", path: Path, file: File) -> bool:  # noqa: F821 (a type of the lazily imported client)
    if remote.lfs is not None:
        return remote.lfs.sha256 == (file.sha256 or sha256_file(path))
    content = path.read_bytes()
    return (
        remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    )  # as git names it


@contextmanager
def _explained(repository: str, token: str | bool | None) -> Iterator[None]:
    """Turn what the Hub client raises into UserError; nothing that is said holds the token or a signed address."""
    import httpx2  # the Hub client's own HTTP library
    from huggingface_hub import errors

    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(record=True) as remarks:
            warnings.simplefilter("always", UserWarning)
            yield
        for remark in remarks:
            if issubclass(remark.category, UserWarning):
                _say(_without(str(remark.message), token))
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        httpx2.HTTPError,
        OSError,
        RuntimeError,
        ValueError,
    ) as problem:
        raise UserError(f"{repository}: {_without(_advice(problem), token)}") from None


def _advice(problem: BaseException) -> str:
    """What a failure means, and what to do about it."""
    import httpx2
    from huggingface_hub import errors

    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, errors.HfHubHTTPError | httpx2.HTTPError):
        cause = cause.__cause__
    again = "run the same command again; what has arrived is kept, and nothing is visible yet"
    if isinstance(cause, errors.HfHubHTTPError):
        status = cause.response.status_code
        said = f" ({cause.server_message})" if cause.server_message else ""
        match status:
            case 401:
                return _REFUSED
            case 403:
                return f"the access token may not write here{said}: use one of somebody who may"
            case 404:
                return "there is no such repository, or the access token does not see it"
            case 412:
                return "somebody else committed meanwhile: run the same command again"
            case _:
                return f"the Hub answered with HTTP {status}{said}: {again}"
    if isinstance(problem, PermissionError):  # by the storage, whose short-lived token came from the Hub
        return _REFUSED
    if isinstance(cause, httpx2.HTTPError) or isinstance(problem, OSError):
        return f"the connection failed ({type(cause or problem).__name__}): {again}"
    return f"the upload failed ({problem}): {again}"


def _without(text: str, token: str | bool | None) -> str:
    return text.replace(token, "(the token)") if isinstance(token, str) and token else text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
