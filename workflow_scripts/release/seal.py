"""Sealed JSON: a document that carries the sha256 of itself, so that any altered byte of its file is found.

The seal is the hex sha256 over the canonical JSON of the document without the key `seal`. The file must also
equal its own canonical form, so that white space, key order and number spelling are covered as well. A seal
finds accidents; it is no signature, since whoever rewrites the document can seal it again.
"""

import json
from typing import Any

from workflow_scripts.files import canonical_json, sha256_text

KEY = "seal"


def sealed_text(document: dict[str, Any]) -> str:
    """The text of the sealed file: canonical JSON of the document and its seal."""
    return canonical_json({**document, KEY: sha256_text(canonical_json(document))})


def open_sealed(data: bytes) -> dict[str, Any]:
    """The document in a sealed file's bytes, without its seal; ValueError where any byte is not as sealed."""
    document = json.loads(data)
    if not isinstance(document, dict) or not isinstance(document.pop(KEY, None), str):
        raise ValueError("it has no seal")
    if sealed_text(document).encode() != data:
        raise ValueError("its seal does not fit its content")
    return document
