"""README.md of a release: the model card of the repository it is published in; all of it comes from release.json."""

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, StrictUndefined

from workflow_scripts.closure import data_file
from workflow_scripts.release import catalog
from workflow_scripts.release.card import front_matter
from workflow_scripts.release.names import RELEASE

# A gate over such a place speaks for itself, also where it was not run. The gate `ane` reads bundles and runs none.
_HARDWARE_GATES = {"gpu": "the GPU", "engine": "the Neural Engine", "device": "a device"}
_KERNEL_FORMS = ("hostcache_metal", "head_argmax_metal")  # graph forms with Metal kernels
_ENGINE_FORMS = ("ane_chunk", "ane_head")
_SYSTEMS = {"macos": "macOS", "ios": "iOS"}
_SHOWN_BOUNDS = 8  # in a table row
_TEMPLATE = data_file(__file__, "readme.md.j2")


def render(document: dict[str, Any]) -> str:
    """The text, from the content of release.json; equal content gives equal text."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"size": human_size, "bounds": _bounds, "cell": _cell, "includes": _includes}
    kinds = {gate["gate"] for gate in document["gates"].values()}
    body = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        release=document,
        sets=_sets(document),
        loadable=_loadable(document),
        kit=catalog.variants(document),
        kernels="kernels" in kinds,
        chunks=any(folder["driver"] == "chunks" for folder in document["folders"].values()),
        language=any(folder["driver"] == "decode" for folder in document["folders"].values()),
        ungated=[place for kind, place in _HARDWARE_GATES.items() if kind not in kinds],
        not_run={k: gate for k, gate in document["gates"].items() if gate["verdict"] == "not_run"},
        unbuilt=sorted({entry["not_built"] for entry in document["aot"].values() if entry["not_built"]}),
    )
    return front_matter(document) + body


def human_size(count: int) -> str:
    """Bytes in decimal units, as download pages show them."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count} bytes"


def _sets(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The folders that a host runs, those for macOS first."""
    driven = [name for name, folder in document["folders"].items() if folder["driver"]]
    order = list(_SYSTEMS.values())
    return [
        _set(document, name)
        for name in sorted(
            driven, key=lambda name: ([order.index(s) for s in _systems(document, name)], name)
        )
    ]


def _set(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A folder that a host runs: on what, and with which tables of other folders; `bytes` is all of it together."""
    folder, artifacts = document["folders"][name], document["artifacts"]
    tables = [entry["path"] for entry in folder["tables"] if not entry["path"].startswith(f"{name}/")]
    return {
        "folder": name,
        "runs_on": ", ".join([*_systems(document, name), *_unit(document, name)]),
        "tables": tables,
        "bytes": folder["bytes"] + sum(artifacts[path.rpartition("/")[2]]["bytes"] for path in tables),
    }


def _systems(document: Mapping[str, Any], name: str) -> list[str]:
    """Where a folder is meant to run: what its bundles state, else what its name begins with, as apps know it."""
    contents = [document["artifacts"][artifact] for artifact in document["folders"][name]["contents"]]
    stated = [set(entry["platforms"]) for entry in contents if entry.get("platforms")]
    named = {name.partition("/")[0].partition("-")[0]} & _SYSTEMS.keys()
    meant = set.intersection(*stated) if stated else named or _SYSTEMS.keys()
    return [system for key, system in _SYSTEMS.items() if key in meant]


def _unit(document: Mapping[str, Any], name: str) -> list[str]:
    """What its bundles are made for; nothing where that is left to the system."""
    forms = {document["artifacts"][artifact]["form"] for artifact in document["folders"][name]["contents"]}
    if forms & set(_KERNEL_FORMS):
        return ["GPU"]
    return ["Neural Engine"] if forms & set(_ENGINE_FORMS) else []


def _includes(one: Mapping[str, Any]) -> str:
    """Options of the Hub's downloader for one set, without what was compiled of its bundles."""
    paths = [one["folder"], *one["tables"]]
    return " ".join([*(f'--include "{path}/*"' for path in paths), '--exclude "*_aotc_*"'])


def _loadable(document: Mapping[str, Any]) -> str | None:
    """Path of the smallest bundle that any host can load: without Metal kernels, and not compiled."""
    bundles = {
        name: entry
        for name, entry in document["artifacts"].items()
        if name.endswith(".aimodel") and entry["form"] not in _KERNEL_FORMS
    }
    if not bundles:
        return None
    name = min(bundles, key=lambda name: (bundles[name]["bytes"], name))
    return f"{bundles[name]['folders'][0]}/{name}"


def _bounds(bounds: dict[str, Any]) -> str:
    if len(bounds) > _SHOWN_BOUNDS:
        return f"{len(bounds)}, see {RELEASE}"
    return ", ".join(f"{name} {value}" for name, value in sorted(bounds.items())) or "-"


def _cell(text: object) -> str:
    """Text that cannot break a Markdown table row."""
    return " ".join(str(text).replace("|", "\\|").split())
