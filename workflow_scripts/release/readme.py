"""README.md of a release, for the people who download it; everything in it comes from release.json."""

from typing import Any

from jinja2 import Environment, StrictUndefined

from workflow_scripts.closure import data_file
from workflow_scripts.release.names import RELEASE

# A gate over such a place speaks for itself, also where it was not run. The gate `ane` reads bundles and runs none.
_HARDWARE_GATES = {"gpu": "the GPU", "engine": "the Neural Engine", "device": "a device"}
_SHOWN_BOUNDS = 8  # in a table row
_TEMPLATE = data_file(__file__, "readme.md.j2")


def render(document: dict[str, Any]) -> str:
    """The text, from the content of release.json; equal content gives equal text."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"size": human_size, "bounds": _bounds, "cell": _cell}
    kinds = {gate["gate"] for gate in document["gates"].values()}
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        release=document,
        compiled=any(".aimodelc/" in entry["path"] for entry in document["files"]),
        driven=sorted(name for name, folder in document["folders"].items() if folder["driver"]),
        kernels="kernels" in kinds,
        engine="ane" in kinds,
        chunks=any(folder["driver"] == "chunks" for folder in document["folders"].values()),
        language=any(folder["driver"] == "decode" for folder in document["folders"].values()),
        ungated=[place for kind, place in _HARDWARE_GATES.items() if kind not in kinds],
        not_run={k: gate for k, gate in document["gates"].items() if gate["verdict"] == "not_run"},
    )


def human_size(count: int) -> str:
    """Bytes in decimal units, as download pages show them."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count} bytes"


def _bounds(bounds: dict[str, Any]) -> str:
    if len(bounds) > _SHOWN_BOUNDS:
        return f"{len(bounds)}, see {RELEASE}"
    return ", ".join(f"{name} {value}" for name, value in sorted(bounds.items())) or "-"


def _cell(text: object) -> str:
    """Text that cannot break a Markdown table row."""
    return " ".join(str(text).replace("|", "\\|").split())
