"""`catalog.json`: what coreai-kit's catalog says of a release, so that an app can offer it by name.

The kit loads a language bundle through its pipelined engine, and beside it the raw tables, which it fetches from the
same repository. A variant per platform: macOS takes the `.aimodel`, which it compiles by itself; iOS takes a bundle
that was compiled ahead of time, since compiling a whole decoder on a phone runs out of memory (published).
`repo` and `revision` are null until the release is uploaded: a commit cannot hold its own name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

CATALOG = "catalog.json"

VERSION = 1
_DECODER = "decode_tbl"  # the graph form that the kit's engine feeds: it maps the whole table
_TABLES = "raw_tables"  # the layout that the kit reads
_MEGABYTE = 1_000_000


def catalog(
    document: Mapping[str, Any], repository: str | None = None, revision: str | None = None
) -> dict[str, Any] | None:
    """The catalog with the entry of one release, or None where the kit could load nothing of it.

    `document` is the content of release.json (`files`, `folders` and `artifacts` are read), `revision` the commit of
    the repository that holds the release.
    """
    variants: dict[str, dict[str, Any]] = {}
    for platform, folder, tables in _loadable(document):
        # Of several, the first by name: the oldest architecture. The kit knows one bundle per platform.
        size = sum(_bytes_below(document, path) for path in (folder, tables))
        variants.setdefault(platform, {"path": folder, "sizeMB": -(-size // _MEGABYTE)})
    if not variants:
        return None
    entry = {
        "id": document["model"],
        "repo": repository,
        "revision": revision,
        "kind": "chat",
        "engine": "pipelined",
        "variants": variants,
    }
    return {"version": VERSION, "models": [entry]}


def _loadable(document: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Platform, folder and path of the tables, for each folder that the kit can load."""
    artifacts = document["artifacts"]
    by_digest = {entry["digest"]: name for name, entry in sorted(artifacts.items())}
    for folder, entry in sorted(document["folders"].items()):
        for name in entry["contents"]:
            compiled = artifacts[name]["stage"] == "aot"
            source = (
                artifacts.get(by_digest.get(artifacts[name]["inputs"]["bundle"]))
                if compiled
                else artifacts[name]
            )
            if source is None or source["form"] != _DECODER:
                continue
            platform = artifacts[name]["params"]["platform"] if compiled else "macOS"
            tables = by_digest.get(source["inputs"]["tables"])
            if compiled == (platform == "iOS") and tables and artifacts[tables]["form"] == _TABLES:
                yield platform.lower(), folder, f"{artifacts[tables]['folders'][0]}/{tables}"


def _bytes_below(document: Mapping[str, Any], path: str) -> int:
    return sum(entry["size"] for entry in document["files"] if entry["path"].startswith(f"{path}/"))
