"""What the writers of both layouts share: blocks of rows, and the files and figures that are the same in both."""

import math
from pathlib import Path

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.errors import UserError
from workflow_scripts.tables.dump import FLOAT, PROJECTION, PROJECTION_NORM, Meta

BLOCK_VALUES = 1 << 22  # values in work at once: some 60 MB of temporaries


def row_blocks(shape: tuple[int, ...], block_values: int) -> list[slice]:
    """Slices of the first axis, of about `block_values` values each."""
    size = max(1, block_values // math.prod(shape[1:]))
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]


def finite_rows(checkpoint: Checkpoint, name: str, block: slice) -> np.ndarray:
    """Rows of a tensor in float32. Raises UserError for a value that is not finite."""
    rows = checkpoint.float32(name, block)
    if not np.isfinite(rows).all():
        raise UserError(f"{name} holds a value that is infinite or not a number: the checkpoint is damaged")
    return rows


def write_projection(checkpoint: Checkpoint, out: Path, block_values: int) -> None:
    """The context projection and its norm's weight. Raises UserError as `finite_rows` does."""
    _write_floats(checkpoint, "per_layer_model_projection.weight", out / PROJECTION, block_values)
    _write_floats(checkpoint, "per_layer_projection_norm.weight", out / PROJECTION_NORM, block_values)


def meta_of(checkpoint: Checkpoint) -> Meta:
    """Square roots and divisions only: they are exactly rounded everywhere, which a power is not."""
    config = checkpoint.config
    return Meta(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        row_size=config.num_hidden_layers * config.hidden_size_per_layer_input,
        layers=config.num_hidden_layers,
        layer_size=config.hidden_size_per_layer_input,
        embed_scale_main=math.sqrt(config.hidden_size),
        embed_scale_pl=math.sqrt(config.hidden_size_per_layer_input),
        proj_scale=1 / math.sqrt(config.hidden_size),
        input_scale=math.sqrt(0.5),
        rms_eps=config.rms_norm_eps,
        checkpoint=checkpoint.digest,
    )


def _write_floats(checkpoint: Checkpoint, name: str, path: Path, block_values: int) -> None:
    with path.open("wb") as out:
        for block in row_blocks(checkpoint.shape(name), block_values):
            out.write(finite_rows(checkpoint, name, block).astype(FLOAT).data)
