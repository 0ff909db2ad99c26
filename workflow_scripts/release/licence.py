"""The licence that a checkpoint states about itself, to be carried on with everything made from it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_PREFIXES = ("license", "licence", "notice")
_CARD = "README.md"


@dataclass(frozen=True)
class Licence:
    """Name and link as the model card's head states them (None: not stated), and the licence files."""

    name: str | None
    link: str | None
    files: tuple[Path, ...]


def read_licence(source: Path) -> Licence:
    """Read LICENSE and NOTICE files and the head of README.md in a checkpoint's folder."""
    files = [path for path in source.iterdir() if path.is_file() and path.name.lower().startswith(_PREFIXES)]
    head = _card_head(source / _CARD)
    name = head.get("license_name") or head.get("license")
    return Licence(
        name=str(name) if name else None,
        link=str(head["license_link"]) if head.get("license_link") else None,
        files=tuple(sorted(files)),
    )


def _card_head(path: Path) -> dict[str, Any]:
    """The YAML between the two `---` lines that open a model card; empty where there is none."""
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[:1] != ["---"] or "---" not in lines[1:]:
        return {}
    try:
        head = yaml.safe_load("\n".join(lines[1 : lines.index("---", 1)]))
    except yaml.YAMLError:
        return {}  # a card is prose by hand: what cannot be read states nothing
    return head if isinstance(head, dict) else {}
