"""What a release must be before it may be published: whole, passed, and free of what belongs to one machine."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.needed import REHEARSAL
from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError
from workflow_scripts.files import file_stamp
from workflow_scripts.release import seal
from workflow_scripts.release.names import RECORDS, RELEASE
from workflow_scripts.release.verify import verify

_SHOWN = 5
_HEAD = 1 << 16  # bytes by which text is told from anything else
_BLOCK = 1 << 24
_OVERLAP = 1 << 10  # longer than whatever is searched for

# A path of one machine has a name below one of these folders, and something below that: vocabularies hold the first.
_LOCAL_PATH = re.compile(
    rb"(?<![\w.:/-])(?:/(?:home|Users)/[\w.-]+/[\w.-]+|/root/[\w.-]+/|/(?:private/)?(?:tmp|var/folders)/[\w.-]+/)"
    rb"|\b[A-Za-z]:\\{1,2}Users\\{1,2}[\w.-]+|\bfile:///[\w.-]+/"
)
_SECRET = re.compile(
    rb"\b(?:hf_|api_org_)[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bAKIA[0-9A-Z]{16}\b"
    rb"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


@dataclass(frozen=True)
class Publishable:
    """A release that may be published. `files`: path -> size, sha256 (None for what nothing lists) and stamp."""

    folder: Path
    document: Mapping[str, Any]
    files: Mapping[str, "File"]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stamp[0] for file in self.files.values())

    def check_untouched(self) -> None:
        """Raise UserError where a file was written since it was checked."""
        for path, file in self.files.items():
            if not (self.folder / path).is_file() or file_stamp(self.folder / path) != file.stamp:
                raise UserError(
                    f"{path} changed while the release was being published: verify it and run again"
                )


@dataclass(frozen=True)
class File:
    """One file of a release: hex sha256 as listed, or None for the records that nothing lists; and its stamp."""

    sha256: str | None
    stamp: list[int]


def check(release: Path, token: str | None = None) -> Publishable:
    """Check a release folder. Raises UserError that says why it may not be published.

    `token` is the user's own, which no file may hold.
    """
    stamps = {path: file_stamp(release / path) for path in _present(release)}
    problems = verify(release).problems
    if problems:
        shown = "; ".join(f"{path}: {problem}" for path, problem in sorted(problems.items())[:_SHOWN])
        raise UserError(f"{release} is not as it was released, so it is not published: {shown}")
    document = seal.open_sealed((release / RELEASE).read_bytes())
    _check_weights(document)
    _check_gates(document)
    digests = {entry["path"]: entry["sha256"] for entry in document["files"]}
    names = [*digests, *RECORDS]
    publishable = Publishable(
        release, document, {name: File(digests.get(name), stamps[name]) for name in names}
    )
    _check_texts(publishable, token)
    publishable.check_untouched()
    return publishable


def _present(release: Path) -> list[str]:
    return [path.relative_to(release).as_posix() for path in release.rglob("*") if path.is_file()]


def _check_weights(document: Mapping[str, Any]) -> None:
    if document["checkpoint"]["origin"]["kind"] == REHEARSAL:
        raise UserError("the weights are random: a rehearsal is not published")


def _check_gates(document: Mapping[str, Any]) -> None:
    required = {name: gate for name, gate in document["gates"].items() if gate["required"]}
    if not required:
        raise UserError(
            "the release was judged by no required gate, so it is not published: see gates.required"
        )
    bad = [
        f"`{name}` on {gate['target']}: {gate['verdict']}"
        for name, gate in document["gates"].items()
        if gate["verdict"] == "fail" or (gate["required"] and gate["verdict"] != "pass")
    ]
    if bad:
        raise UserError(f"gates stop the publishing: {'; '.join(bad[:_SHOWN])}")


def _check_texts(release: Publishable, token: str | None) -> None:
    places = [os.fsencode(place) for place in _own_places()]
    found = []
    for path in release.files:
        if problem := _problem(release.folder / path, places, token):
            found.append(f"{path} {problem}")
    if found:
        raise UserError(
            f"{'; '.join(found[:_SHOWN])}: nothing of one machine or person is published; build the release again "
            "from inputs without it"
        )


def _problem(path: Path, places: list[bytes], token: str | None) -> str | None:
    """What a text file must not hold. A secret is not shown."""
    for block in _text_blocks(path):
        if (token and token.encode() in block) or _SECRET.search(block):
            return "holds what looks like an access token or a private key"
        own = next((place for place in places if place in block), None)
        local = own or ((match := _LOCAL_PATH.search(block)) and match.group())
        if local:
            return f"holds a path of one machine ({os.fsdecode(local)})"
    return None


def _text_blocks(path: Path) -> Iterator[bytes]:
    """The content of a text file in overlapping blocks; nothing of a file that is none."""
    with path.open("rb") as stream:
        head = stream.read(_HEAD)
        if not _is_text(head):
            return
        block = head + stream.read(_BLOCK)
        while block:
            yield block
            more = stream.read(_BLOCK)
            block = block[-_OVERLAP:] + more if more else b""


def _is_text(head: bytes) -> bool:
    """UTF-8 without NUL; the last character may be cut off."""
    if b"\0" in head:
        return False
    try:
        head.decode()
    except UnicodeDecodeError as problem:
        return len(head) == _HEAD and problem.start > len(head) - 4
    return True


def _own_places() -> list[str]:
    """Folders of this host below which no text may name anything; a home such as `/root` is too short a sign."""
    places = [str(ROOT), os.path.expanduser("~"), sys.prefix]  # noqa: PTH111 (Path.home raises without a home)
    return [f"{place}{os.sep}" for place in places if place.count(os.sep) > 1]
