"""Which rows of the head the Core ML reference keeps: a head of all ids is what a phone's engine is slowest at.

Kept are the ids that no merge of the tokenizer makes: single characters, bytes, special tokens. With them any text can
be written. The rest of the rows goes to the results of the merges, the first ones first, which are the most frequent.
"""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json

HEAD_ROWS = "head_rows.json"
FORMAT = 1


def kept_ids(tokenizer: Path, rows: int) -> list[int]:
    """The token ids of `rows` rows of a head, ascending; `tokenizer` is the tokenizer.json.

    Raises UserError where so few rows do not hold the ids that no merge makes, or the tokenizer has fewer ids.
    """
    vocab, merges, special = _read(tokenizer)
    results = (vocab[token] for token in map("".join, merges) if token in vocab)
    made = [token for token in dict.fromkeys(results) if token not in special]
    basic = {*vocab.values()} - {*made}
    if rows < len(basic):
        raise UserError(
            f"coreml.head_rows is {rows}, but {len(basic)} ids of the tokenizer are made by no merge and cannot be "
            f"left out: set it to {len(basic)} or more"
        )
    if rows > len(basic) + len(made):
        raise UserError(
            f"coreml.head_rows is {rows}, but the tokenizer has {len(basic) + len(made)} ids: set it to at most that"
        )
    return sorted(basic | {*made[: rows - len(basic)]})


def write_head_rows(folder: Path, ids: list[int]) -> None:
    """Write `head_rows.json`, by which a host finds the id of a row: `token_ids[row]`."""
    write_json(folder / HEAD_ROWS, {"format": FORMAT, "token_ids": ids})


def read_head_rows(folder: Path) -> list[int]:
    """The ids of `write_head_rows`. Raises UserError naming the file where it is not one."""
    path = folder / HEAD_ROWS
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"{path} cannot be read: {problem}") from None
    ids = record.get("token_ids") if isinstance(record, dict) and record.get("format") == FORMAT else None
    if not (isinstance(ids, list) and all(type(row) is int for row in ids)):
        raise UserError(
            f"{path} has no list `token_ids` of format {FORMAT}: build the Core ML reference again"
        )
    return ids


def _read(path: Path) -> tuple[dict[str, int], list[list[str]], set[int]]:
    """Token -> id of all tokens, the pairs that are merged, the first ones first, and the ids of special tokens."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model = raw["model"]
        added = {entry["content"]: entry["id"] for entry in raw["added_tokens"]}
        vocab = {**model["vocab"], **added}
        # Older files have a pair as one text, its parts apart by a space.
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(
            f"{path} is no tokenizer with merges ({problem!r}), so its head cannot be pruned"
        ) from None
    return vocab, merges, {*added.values()}
