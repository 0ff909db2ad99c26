"""Two releases that should be equal: their files by digest, and what else differs, key by key.

Two hosts give the same bytes but for what only one of them can do: compile ahead of time, or run a gate that needs a
GPU. Where a release lacks that, it is left out on both sides, and said. Then what remains of `release.json` is compared
as a document, and README.md, catalog.json and compile.sh are each held against their own release.json, from which they
follow, as SHA256SUMS and statement.json do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workflow_scripts.configuration.wording import show
from workflow_scripts.release import seal
from workflow_scripts.release.assemble import TEXTS as TEXTS
from workflow_scripts.release.names import RELEASE, STATEMENT, SUMS

_BLOCK = 1 << 20
_ASKED = ("bundle", "target", "devices")  # of a compiled bundle: what does not depend on who built it
_JUDGED = ("gate", "target", "required", "inputs")  # of a gate, likewise
_NOTHING = object()  # where one of two documents lacks a key


@dataclass(frozen=True)
class Comparison:
    """How two releases differ, by path (empty: all that was compared is equal); what was left out, with the reason.

    `files` is how many files, of those that release.json lists, are equal; `identical`, whether all of them are, and
    release.json.
    """

    differences: dict[str, str]
    left_out: dict[str, str]
    files: int
    identical: bool


def compare(released: Path, rebuilt: Path) -> Comparison:
    """Compare two whole releases of one configuration; the second is the one built here."""
    documents = _document(released), _document(rebuilt)
    unbuilt, unrun = _unbuilt(*documents), _not_run(*documents)
    digests = [_digests(document, unbuilt) for document in documents]
    unequal = [
        path for path in sorted({**digests[0], **digests[1]}) if len({d.get(path) for d in digests}) > 1
    ]
    explained = {
        path for path in unequal if (unbuilt or unrun) and _follow(path, (released, rebuilt), documents)
    }
    differences = {
        path: _file_difference(path, released, rebuilt) for path in unequal if path not in explained
    }
    differences |= _document_difference(
        *(_without(document, documents, unbuilt, unrun) for document in documents)
    )
    if not unbuilt and not unrun:  # else they follow from what has just been compared
        differences |= {
            name: _file_difference(name, released, rebuilt)
            for name in (SUMS, STATEMENT)
            if (released / name).read_bytes() != (rebuilt / name).read_bytes()
        }
    gates = {f"gate {name}": reason for name, reason in unrun.items()}
    identical = (released / SUMS).read_bytes() == (rebuilt / SUMS).read_bytes()
    return Comparison(
        differences, unbuilt | gates, len({**digests[0], **digests[1]}) - len(unequal), identical
    )


def where(one: Path, other: Path) -> str:
    """The offset from which on two different files differ, with the bytes around it."""
    with one.open("rb") as first, other.open("rb") as second:
        start = 0
        while True:
            blocks = first.read(_BLOCK), second.read(_BLOCK)
            if blocks[0] != blocks[1]:
                break
            start += len(blocks[0])
    at = next(i for i, (a, b) in enumerate(zip_longest(*blocks)) if a != b)
    around = [block[max(0, at - 20) : at + 40] for block in blocks]
    return f"from byte {start + at} on: {around[0]!r} against {around[1]!r}"


def _document(release: Path) -> dict[str, Any]:
    return seal.open_sealed((release / RELEASE).read_bytes())


def _unbuilt(released: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> dict[str, str]:
    """Folders of bundles to be compiled ahead of time that one of two releases has not got -> why."""
    return {
        path: _lack("built", released["aot"][path]["not_built"], rebuilt["aot"][path]["not_built"])
        for path in sorted(released["aot"].keys() & rebuilt["aot"].keys())
        if released["aot"][path]["not_built"] or rebuilt["aot"][path]["not_built"]
    }


def _not_run(released: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> dict[str, str]:
    """Gates that no release needs and that were not run for one of two -> why."""
    reasons = {}
    for name in sorted(released["gates"].keys() & rebuilt["gates"].keys()):
        gates = released["gates"][name], rebuilt["gates"][name]
        lacks = [gate["reason"] if gate["verdict"] == "not_run" else None for gate in gates]
        if any(lacks) and not any(gate["required"] for gate in gates):
            reasons[name] = _lack("run", *lacks)
    return reasons


def _lack(done: str, released: str | None, rebuilt: str | None) -> str:
    """Where something was not done, and why; None stands for where it was."""
    if released == rebuilt:
        return f"not {done} for the release nor here ({released})"
    lacks = {"for the release": released, "here": rebuilt}
    return f"not {done} " + " nor ".join(f"{place} ({why})" for place, why in lacks.items() if why)


def _digests(document: Mapping[str, Any], unbuilt: Mapping[str, str]) -> dict[str, str]:
    """Path -> sha256 of the listed files outside of some folders."""
    return {
        entry["path"]: entry["sha256"]
        for entry in document["files"]
        if not any(entry["path"].startswith(f"{folder}/") for folder in unbuilt)
    }


def _file_difference(path: str, released: Path, rebuilt: Path) -> str:
    if not (rebuilt / path).is_file():
        return "is in the release only"
    if not (released / path).is_file():
        return "is in the rebuild only"
    return f"differs {where(released / path, rebuilt / path)}"


def _follow(
    path: str, releases: tuple[Path, Path], documents: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> bool:
    """Whether a text of two releases is in both what this checkout makes of their own release.json."""
    if path not in TEXTS:
        return False
    return all(
        _text(path, document)
        == ((release / path).read_text(encoding="utf-8") if (release / path).is_file() else None)
        for release, document in zip(releases, documents, strict=True)
    )


def _text(name: str, document: Mapping[str, Any]) -> str | None:
    """A text as it follows from a release.json: of the other texts it knows those before it. None: there is none."""
    names = list(TEXTS)
    later = names[names.index(name) :]
    known = [entry for entry in document["files"] if entry["path"] not in later]
    return TEXTS[name]({**document, "files": known}) or None


def _without(
    document: Mapping[str, Any],
    documents: tuple[Mapping[str, Any], Mapping[str, Any]],
    unbuilt: Mapping[str, str],
    unrun: Mapping[str, str],
) -> dict[str, Any]:
    """A release.json without its files, which are compared by themselves, and without what is left out."""
    tools = {pair for one in documents for pair in _tools_of(one, unbuilt)}
    return {
        **document,
        "files": None,
        "folders": {name: entry for name, entry in document["folders"].items() if name not in unbuilt},
        "artifacts": {
            name: entry for name, entry in document["artifacts"].items() if not _lies_in(entry, unbuilt)
        },
        "aot": {
            name: _only(entry, _ASKED) if name in unbuilt else entry
            for name, entry in document["aot"].items()
        },
        "gates": {
            name: _only(entry, _JUDGED) if name in unrun else entry
            for name, entry in document["gates"].items()
        },
        "tools": {
            name: left
            for name, versions in document["tools"].items()
            if (left := [version for version in versions if (name, version) not in tools])
        },
    }


def _tools_of(document: Mapping[str, Any], unbuilt: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and version of the tools that made what lies in some folders alone."""
    for entry in document["artifacts"].values():
        if _lies_in(entry, unbuilt):
            yield from entry["tools"].items()
    for name in unbuilt:
        if tool := document["aot"][name]["tool"]:
            yield tool.partition(" ")[0], tool.partition(" ")[2] or tool


def _lies_in(artifact: Mapping[str, Any], folders: Mapping[str, str]) -> bool:
    return all(folder in folders for folder in artifact["folders"])


def _only(entry: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: entry[key] for key in keys}


def _document_difference(released: Mapping[str, Any], rebuilt: Mapping[str, Any]) -> dict[str, str]:
    places = list(_places("", released, rebuilt))
    if not places:
        return {}
    more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
    return {RELEASE: f"differs at {places[0]}{more}"}


def _places(path: str, one: Any, other: Any) -> Iterator[str]:
    """Where two JSON values differ, and what they have there."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({**one, **other}):
            yield from _places(
                f"{path}/{key}" if path else key, one.get(key, _NOTHING), other.get(key, _NOTHING)
            )
    elif one != other:
        yield f"{path}: {_shown(one)} against {_shown(other)}"


def _shown(value: Any) -> str:
    return "nothing" if value is _NOTHING else show(value)
