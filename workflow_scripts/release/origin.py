"""Which checkpoint bundles and tables say they were made from: what is used together must be of one.

The tables of one checkpoint beside a bundle of another answer nonsense, and nothing else would notice.
"""

import json
from pathlib import Path

from workflow_scripts.coreai.described import described
from workflow_scripts.errors import UserError

_BUNDLE, _COMPILED = ".aimodel", ".aimodelc"


def read_identity(checkpoint: Path) -> str:
    """The identity of the weights of a `checkpoint` result, which everything made from it carries."""
    return json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))["digest"]


def stated_checkpoint(path: Path) -> str:
    """The identity that a bundle has in its metadata, or raw tables in their `meta.json`.

    Raises UserError where there is none.
    """
    if path.suffix == _BUNDLE:
        return described(path)["checkpoint"]
    record = path / "meta.json"
    try:
        return json.loads(record.read_text(encoding="utf-8"))["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{record} does not say which checkpoint the tables were made from: build again"
        ) from None


def check_origin(path: Path, identity: str) -> None:
    """Raise UserError where a bundle or tables were made from another checkpoint, or do not say from which.

    Cores and heads are made from weights, so their manifests name no checkpoint. A compiled bundle says nothing.
    """
    if path.suffix == _COMPILED:
        return
    found = stated_checkpoint(path)
    if found != identity:
        raise UserError(
            f"{path.name} was made from another checkpoint (its metadata says {str(found)[:12]}, "
            f"expected {identity[:12]}): build it again from this one"
        )
