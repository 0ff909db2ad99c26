"""What the writers of both layouts share: blocks of rows, and the files and figures that are the same in both."""

import math
from pathlib import Path

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.errors import UserError
from workflow_scripts.tables.dump import FLOAT, PROJECTION, PROJECTION_NORM, Meta

# Values in work at once on each thread: 3 MB for int8 rows, some 15 MB for the 4-bit grid. Of 2^22, which do not stay
# in the processor's cache, int8 rows take half as long again (measured).
BLOCK_VALUES = 1 << 20


def not_finite(name: str, row: int) -> UserError:
    """What a writer raises for a value in a row of a tensor."""
    return UserError(
        f"{name}, row {row}, holds a value that is infinite or not a number: the checkpoint is damaged"
    )


def write_projection(checkpoint: Checkpoint, out: Path, block_values: int) -> None:
    """The context projection and its norm's weight. Raises UserError as `not_finite` words it."""
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
            rows = checkpoint.float32(name, block)
            bad = np.argwhere(~np.isfinite(rows))
            if len(bad):
                raise not_finite(name, block.start + int(bad[0, 0]))
            out.write(rows.astype(FLOAT, copy=False).data)
