"""`python -m workflow_scripts verify RELEASE`: re-hash a release and name every file that is not as released.

Three records back each other up, `release.json`, `SHA256SUMS` and `statement.json`: each says what sha256 every file
has, so where one was altered, the other two convict it (see statement.py). measured.json is sealed by itself.
With `--rebuild` the release is then built again from this checkout, and compared.
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
from workflow_scripts.release import seal
from workflow_scripts.release.names import FORMAT, MEASURED, RECORDS, RELEASE, STATEMENT, SUMS
from workflow_scripts.release.statement import altered_records, believed_digests

_BLOCK = 1 << 24

# What a download from the Hub has and no release: a file of the repository's own, and the client's memory.
_HUBS_FILE = ".gitattributes"
_HUBS_FOLDER = ".cache/huggingface/"


@dataclass(frozen=True)
class Report:
    """Outcome: problem by path (empty: the release is whole), and how much was hashed."""

    problems: dict[str, str]
    files: int
    size: int
    title: str


def main(arguments: list[str]) -> int:
    """Verify from the command line: 0 when every byte is as released, and as rebuilt if that is asked for; else 1."""
    options = _parse(arguments)
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
    print(f"{report.title}: {report.files} files, {report.size:,} bytes, all as released", flush=True)
    if not options.rebuild:
        return 0
    from workflow_scripts.checks.rebuild import rebuild  # builds, as no room of the package does

    return rebuild(options.release, options.configfile, options.workdir)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m workflow_scripts verify",
        description="Re-hash a release; name every file that differs. With --rebuild also build it again, and compare.",
    )
    parser.add_argument(
        "release", type=Path, help="folder with SHA256SUMS and release.json, wherever it was copied"
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="build the release again from this checkout, in a temporary copy and without a store, and compare",
    )
    parser.add_argument(
        "--configfile",
        type=Path,
        metavar="FILE",
        help="the model file it was built with (default: the one of config/ with the release's `model`)",
    )
    parser.add_argument(
        "--workdir",
        type=Path,
        metavar="FOLDER",
        help="where the copy is made, which takes tens of GB for a real model (default: the system's temporary folder)",
    )
    options = parser.parse_args(arguments)
    if not options.rebuild and (options.configfile or options.workdir):
        parser.error("--configfile and --workdir are for --rebuild")
    return options


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
    three = (records[RELEASE], records[SUMS], records[STATEMENT])
    listed = {path: sha256 for path, sha256 in believed_digests(*three).items() if path != RELEASE}
    altered = _altered_measured(records[MEASURED]) | altered_records(*three) | _altered_files(listed, digests)
    problems |= {name: problem for name, problem in altered.items() if name in digests}
    problems |= _missing_and_stray(listed, found, problems)
    title = f"{document['model']} ({document['slug']})" if document and not problems else str(release)
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


def _altered_measured(measured: bytes) -> dict[str, str]:
    if _open_sealed(measured) is not None:
        return {}
    return {MEASURED: "altered (its seal does not fit its content)"}


def _altered_files(listed: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    return {
        name: f"altered (sha256 {digests[name][:12]}..., released {listed[name][:12]}...)"
        for name in listed.keys() & digests.keys()
        if name not in RECORDS and digests[name] != listed[name]
    }


def _open_sealed(data: bytes) -> dict[str, Any] | None:
    try:
        document = seal.open_sealed(data)
    except ValueError:  # undecodable bytes and broken JSON are ValueErrors too
        return None
    if document.get("format") != FORMAT:
        raise UserError(f"the release has format {document.get('format')}; this version reads {FORMAT}")
    return document


def _walk(release: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes of the regular files below a folder, and what else lies there; nothing is followed or opened.

    What a download from the Hub adds is passed over.
    """
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}

    def unreadable(problem: OSError) -> None:
        relative = Path(problem.filename).relative_to(release).as_posix()
        if not _is_hubs(relative):
            problems[relative] = _cannot_be_read(problem)

    for folder, names, files in os.walk(release, onerror=unreadable):
        links = [name for name in names if (Path(folder) / name).is_symlink()]
        for name in [*links, *files]:
            path = Path(folder) / name
            relative = path.relative_to(release).as_posix()
            if _is_hubs(relative):
                continue
            try:
                status = path.lstat()
            except OSError as problem:  # a folder without the x permission lists names and nothing else
                unreadable(problem)
                continue
            if stat.S_ISREG(status.st_mode):
                sizes[relative] = status.st_size
            elif stat.S_ISLNK(status.st_mode):
                problems[relative] = "a symlink (a release holds none: copy the file itself)"
            else:
                problems[relative] = "not a regular file"
    return sizes, problems


def _is_hubs(path: str) -> bool:
    return path == _HUBS_FILE or path.startswith(_HUBS_FOLDER)


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
