"""`python -m workflow_scripts verify RELEASE`: re-hash a release and name every file that is not as released.

Three records back each other up: `SHA256SUMS` lists release.json, `release.json` lists every other file, and
both JSON files are sealed. So where two disagree, it can be told which one was altered.
"""

import argparse
import hashlib
import logging
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL, track
from workflow_scripts.release import seal, sums
from workflow_scripts.release.names import FORMAT, MEASURED, RECORDS, RELEASE, SUMS

_BLOCK = 1 << 24


@dataclass(frozen=True)
class Report:
    """Outcome: problem by path (empty: the release is whole), and how much was hashed."""

    problems: dict[str, str]
    files: int
    size: int
    title: str


def main(arguments: list[str]) -> int:
    """Verify from the command line: 0 when every byte is as released, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m workflow_scripts verify",
        description="Re-hash a release; name every file that differs.",
    )
    parser.add_argument(
        "release", type=Path, help="folder with SHA256SUMS and release.json, wherever it was copied"
    )
    options = parser.parse_args(arguments)
    try:
        with _progress_on_terminal():
            report = verify(options.release)
    except OSError as problem:
        raise UserError(f"{problem.filename or options.release} {_cannot_be_read(problem)}") from None
    for path, problem in sorted(report.problems.items()):
        print(f"{_printable(path)}: {problem}")
    if report.problems:
        print(f"{len(report.problems)} of {report.files} files are not as released: download them again")
        return 1
    print(f"{report.title}: {report.files} files, {report.size:,} bytes, all as released")
    return 0


def verify(release: Path) -> Report:
    """Check a release folder. Raises UserError where the folder is no release at all."""
    if not release.is_dir():
        raise UserError(f"{release} is not a folder: name the release folder, which holds {SUMS}")
    if not {RELEASE, SUMS} & {path.name for path in release.iterdir()}:
        raise UserError(f"{release} is no release: it has neither {SUMS} nor {RELEASE}")
    found, problems = _walk(release)
    digests, unread = _hash_files(release, found)
    problems |= unread
    records = {name: (release / name).read_bytes() if name in digests else b"" for name in RECORDS}
    document = _open_sealed(records[RELEASE])
    listed = _listed(document, records[SUMS])
    problems |= _altered_records(records, document, digests) | _altered_files(listed, digests)
    problems |= _missing_and_stray(listed, found, problems)
    title = f"{document['model']} ({document['slug']})" if document else str(release)
    return Report(problems, len(found.keys() | problems.keys()), sum(found.values()), title)


def _missing_and_stray(
    listed: Mapping[str, str], found: Mapping[str, int], problems: Mapping[str, str]
) -> dict[str, str]:
    """What is listed and not there, and what is there and not listed, as far as no known problem explains it."""
    missing = (set(RECORDS) | listed.keys()) - found.keys() - problems.keys()
    explained = {
        name for name in missing if any(str(folder) in problems for folder in PurePosixPath(name).parents)
    }
    # With both lists unreadable nothing can be called stray.
    stray = found.keys() - listed.keys() - set(RECORDS) - problems.keys() if listed else set()
    return dict.fromkeys(missing - explained, "missing") | dict.fromkeys(stray, "not part of the release")


def _altered_records(
    records: Mapping[str, bytes], document: dict[str, Any] | None, digests: Mapping[str, str]
) -> dict[str, str]:
    """Which of the three records are not as released; a record that is absent or unreadable is told elsewhere."""
    problems = {}
    if RELEASE in digests and document is None:
        problems[RELEASE] = "altered (its seal does not fit its content)"
    if MEASURED in digests and _open_sealed(records[MEASURED]) is None:
        problems[MEASURED] = "altered (its seal does not fit its content)"
    if SUMS not in digests:
        return problems
    if document is not None:  # the seal holds, so release.json says what SHA256SUMS must be
        expected = sums.format_sums({**_document_files(document), RELEASE: digests[RELEASE]})
        if records[SUMS] != expected.encode():
            problems[SUMS] = f"altered (it is not the list that {RELEASE} stands for)"
    elif _parse_sums(records[SUMS]) is None:
        problems[SUMS] = "altered (it is no sorted list of `<sha256>  <path>` lines)"
    return problems


def _altered_files(listed: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    return {
        name: f"altered (sha256 {digests[name][:12]}..., released {listed[name][:12]}...)"
        for name in listed.keys() & digests.keys()
        if name not in RECORDS and digests[name] != listed[name]
    }


def _listed(document: dict[str, Any] | None, sums_data: bytes) -> dict[str, str]:
    """sha256 of every file by the best record there is: the sealed one, else SHA256SUMS, else nothing."""
    return _document_files(document) if document is not None else _parse_sums(sums_data) or {}


def _document_files(document: Mapping[str, Any]) -> dict[str, str]:
    return {entry["path"]: entry["sha256"] for entry in document["files"]}


def _open_sealed(data: bytes) -> dict[str, Any] | None:
    try:
        document = seal.open_sealed(data)
    except ValueError:  # undecodable bytes and broken JSON are ValueErrors too
        return None
    if document.get("format") != FORMAT:
        raise UserError(f"the release has format {document.get('format')}; this version reads {FORMAT}")
    return document


def _parse_sums(data: bytes) -> dict[str, str] | None:
    try:
        return sums.parse_sums(data)
    except ValueError:
        return None


def _walk(release: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes of the regular files below a folder, and what else lies there; nothing is followed or opened."""
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}

    def unreadable(problem: OSError) -> None:
        problems[Path(problem.filename).relative_to(release).as_posix()] = _cannot_be_read(problem)

    for folder, names, files in os.walk(release, onerror=unreadable):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for name in [*links, *files]:
            path = Path(folder) / name
            try:
                status = path.lstat()
            except OSError as problem:  # a folder without the x permission lists names and nothing else
                unreadable(problem)
                continue
            relative = path.relative_to(release).as_posix()
            if stat.S_ISREG(status.st_mode):
                sizes[relative] = status.st_size
            elif stat.S_ISLNK(status.st_mode):
                problems[relative] = "a symlink (a release holds none: copy the file itself)"
            else:
                problems[relative] = "not a regular file"
    return sizes, problems


def _hash_files(release: Path, sizes: Mapping[str, int]) -> tuple[dict[str, str], dict[str, str]]:
    """Hex sha256 of each file that can be read, and the problem of each that cannot."""
    hashes = {name: hashlib.sha256() for name in sizes}
    problems: dict[str, str] = {}
    blocks = sum(-(-size // _BLOCK) for size in sizes.values())
    for block in track(_blocks(release, sorted(sizes)), "verify, blocks of 16 MiB", blocks):
        if isinstance(block.content, OSError):
            problems[block.path] = _cannot_be_read(block.content)
        else:
            hashes[block.path].update(block.content)
    return {name: value.hexdigest() for name, value in hashes.items() if name not in problems}, problems


@dataclass(frozen=True)
class _Block:
    """A piece of a file, or the error that ended its reading."""

    path: str
    content: bytes | OSError


def _blocks(release: Path, paths: Iterable[str]) -> Iterator[_Block]:
    for path in paths:
        try:
            with (release / path).open("rb") as stream:
                while content := stream.read(_BLOCK):
                    yield _Block(path, content)
        except OSError as problem:
            yield _Block(path, problem)


def _cannot_be_read(problem: OSError) -> str:
    return f"cannot be read ({problem.strerror or problem})"


def _printable(path: str) -> str:
    return path if path.isprintable() else ascii(path)


@contextmanager
def _progress_on_terminal() -> Iterator[None]:
    """Show the progress lines of long work on stderr, and nothing else of logging."""
    handler, before = logging.StreamHandler(sys.stderr), TERMINAL.level
    TERMINAL.addHandler(handler)
    TERMINAL.setLevel(logging.INFO)
    try:
        yield
    finally:
        TERMINAL.removeHandler(handler)
        TERMINAL.setLevel(before)
