"""`catalog.json`: what coreai-kit's catalog says of a release, so that an app can offer it by name.

The kit loads a language bundle through its pipelined engine, and beside it the raw tables, which it fetches from the
same repository. A variant per platform: macOS takes the `.aimodel`, which it compiles by itself; iOS takes a bundle
that was compiled ahead of time, since compiling a whole decoder on a phone runs out of memory (published).
`repo` and `revision` are null until the release is uploaded: a commit cannot hold its own name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
PLATFORMS = ("macos", "ios")  # the kit's keys
_DECODER = "decode_tbl"  # the graph form that the kit's engine feeds: it maps the whole table
_TABLES = "raw_tables"  # the layout that the kit reads
_AHEAD = "aot"  # the stage of what was compiled ahead of time
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Variant:
    """What the kit loads on one platform: the folder of a language bundle and that of its tables, in the release."""

    folder: str
    tables: str


def catalog(
    document: Mapping[str, Any], repository: str | None = None, revision: str | None = None
) -> dict[str, Any] | None:
    """The catalog with the entry of one release, or None where the kit could load nothing of it.

    `document` is the content of release.json (`files`, `folders` and `artifacts` are read), `revision` the commit of
    the repository that holds the release.
    """
    found = variants(document)
    if not found:
        return None
    entry = {
        "id": document["model"],
        "name": document["model"],
        "repo": repository,
        "revision": revision,
        "kind": "chat",
        "engine": "pipelined",
        "variants": {
            platform: {"path": variant.folder, "sizeMB": _megabytes(document, variant)}
            for platform, variant in found.items()
        },
    }
    return {"version": VERSION, "models": [entry]}


def variants(document: Mapping[str, Any]) -> dict[str, Variant]:
    """What the kit can load of a release, by platform; none where there is nothing for it."""
    found: dict[str, Variant] = {}
    for platform, variant in _loadable(document):
        # Of several, the first by name: the oldest architecture. The kit knows one bundle per platform.
        found.setdefault(platform, variant)
    return {platform: found[platform] for platform in PLATFORMS if platform in found}


def _loadable(document: Mapping[str, Any]) -> Iterator[tuple[str, Variant]]:
    """Platform and variant, for each folder with a decoder whose tables the release has in the kit's layout."""
    artifacts = document["artifacts"]
    by_digest = {entry["digest"]: name for name, entry in sorted(artifacts.items())}
    for folder, entry in sorted(document["folders"].items()):
        for name in entry["contents"]:
            platform = _platform(artifacts[name])
            source = _source(artifacts[name], artifacts, by_digest)
            if platform is None or source is None or source["form"] != _DECODER:
                continue
            tables = by_digest.get(source["inputs"]["tables"])
            if tables and artifacts[tables]["form"] == _TABLES:
                yield platform, Variant(folder, f"{artifacts[tables]['folders'][0]}/{tables}")


def _platform(artifact: Mapping[str, Any]) -> str | None:
    """Where the kit takes a bundle: compiled ahead of time on iOS, as it was exported on macOS; None: nowhere."""
    if artifact["stage"] == _AHEAD:
        return "ios" if artifact["params"]["platform"] == "iOS" else None
    return "macos" if "macos" in artifact.get("platforms", PLATFORMS) else None


def _source(
    artifact: Mapping[str, Any], artifacts: Mapping[str, Any], by_digest: Mapping[str, str]
) -> Mapping[str, Any] | None:
    """The exported bundle: the artifact itself, or what it was compiled from; None where that is not released."""
    if artifact["stage"] != _AHEAD:
        return artifact
    name = by_digest.get(artifact["inputs"]["bundle"])
    return artifacts[name] if name else None


def _megabytes(document: Mapping[str, Any], variant: Variant) -> int:
    size = sum(_bytes_below(document, path) for path in (variant.folder, variant.tables))
    return -(-size // _MEGABYTE)


def _bytes_below(document: Mapping[str, Any], path: str) -> int:
    return sum(entry["size"] for entry in document["files"] if entry["path"].startswith(f"{path}/"))
