"""What a bundle says of itself. Apart from running it, so that packaging needs no numpy."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError


def described(bundle: Path) -> dict[str, Any]:
    """What its export wrote into a bundle's metadata. Raises UserError where that does not name a checkpoint."""
    path = bundle / "metadata.json"
    try:
        said = json.loads(path.read_text(encoding="utf-8"))["creatorDefinedMetadata"]
        said["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path} does not say which checkpoint the bundle was made from: build again"
        ) from None
    return said
