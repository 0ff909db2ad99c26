"""The small files of a rehearsal's checkpoint: its model card, and a small tokenizer that fits a large vocabulary.

Apart from its weights, so that the workflow can ask for names while it plans, without numpy.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.needed import CONFIG, TOKENIZER, read_json_object
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_atomic

TOKENIZER_CONFIG = "tokenizer_config.json"
_COPIED = ("generation_config.json", "chat_template.jinja")
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, *_COPIED)
"""Files that come from a checkpoint with a small vocabulary."""

_CARD = """---
license: apache-2.0
---

# A rehearsal: random weights

A text decoder in the shape that its config.json states, filled with seeded random numbers (seed {seed}).
**Nothing of it comes from anybody's weights, and it knows nothing**: it is for measuring what a release of this size
costs, and no release of it is worth publishing.
"""


def write_small_files(
    folder: Path, config: Path, tokenizer: Mapping[str, Path], vocab_size: int, positions: int, seed: int
) -> None:
    """Write config.json as it is, the model card, and the files of `TOKENIZER_FILES` for `vocab_size` ids.

    Raises UserError where the given tokenizer has more ids than that, or is none that can be widened.
    """
    write_atomic(folder / CONFIG, config.read_bytes())
    write_atomic(folder / "README.md", _CARD.format(seed=seed))
    widened = widen_tokenizer(read_json_object(tokenizer[TOKENIZER]), vocab_size, tokenizer[TOKENIZER])
    _write_pretty(folder / TOKENIZER, widened)
    settings = read_json_object(tokenizer[TOKENIZER_CONFIG])
    _write_pretty(folder / TOKENIZER_CONFIG, settings | {"model_max_length": positions})
    for name in _COPIED:
        write_atomic(folder / name, tokenizer[name].read_bytes())


def widen_tokenizer(tokenizer: dict[str, Any], vocab_size: int, path: Path) -> dict[str, Any]:
    """A tokenizer.json with `<unusedN>` for every id N that is missing below `vocab_size`.

    No merge makes such a token, so every text keeps its ids. They are plain entries of the vocabulary and not added
    tokens, of which the library looks for each in every text. Raises UserError, with `path` in it, where the tokenizer
    is not a BPE, or where an id lies beyond `vocab_size`.
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise UserError(f"{path} has no BPE vocabulary, which alone can be widened: take another tokenizer")
    vocabulary = model["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer.get("added_tokens", []))}
    if max(taken) >= vocab_size:
        raise UserError(
            f"{path} has ids up to {max(taken)}, but the rehearsal's config.json has a vocab_size of {vocab_size}: "
            "give it more, or take a smaller tokenizer"
        )
    unused = {f"<unused{number}>": number for number in range(vocab_size) if number not in taken}
    if twice := sorted(unused.keys() & vocabulary.keys()):
        raise UserError(f"{path} has the token {twice[0]} under another id already: take another tokenizer")
    return tokenizer | {"model": model | {"vocab": vocabulary | unused}}


def _write_pretty(path: Path, value: Any) -> None:
    """JSON in the order of its keys, as such files are published."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
