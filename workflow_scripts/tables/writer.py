"""Makes the raw gather dump of a checkpoint; `raw.py` reads it, so that readers do not depend on this code."""

import math
from pathlib import Path

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.tables.raw import (
    EMBED,
    FLOAT,
    META,
    PER_LAYER,
    PROJECTION,
    PROJECTION_NORM,
    Meta,
    rows_file,
    scale_file,
)

BLOCK_VALUES = 1 << 22  # values in work at once: some 60 MB of temporaries
_SMALLEST_SCALE = np.float32(
    1e-8
)  # of the published dumps; it also keeps an all-zero row from dividing by zero


def write_raw_tables(checkpoint: Checkpoint, out: Path, block_values: int = BLOCK_VALUES) -> None:
    """Fill the folder `out` with the seven files of the dump (see `raw.py`), streamed in blocks of rows.

    Raises UserError naming a tensor that holds a value which is not finite.
    """
    _write_rows(checkpoint, "embed_tokens.weight", EMBED, out, block_values)
    _write_rows(checkpoint, "embed_tokens_per_layer.weight", PER_LAYER, out, block_values)
    _write_floats(checkpoint, "per_layer_model_projection.weight", out / PROJECTION, block_values)
    _write_floats(checkpoint, "per_layer_projection_norm.weight", out / PROJECTION_NORM, block_values)
    write_json(out / META, _meta(checkpoint).to_json())


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 per row: finite float32 [n, K] -> int8 [n, K] in -127..127 and float32 scales [n].

    All in float32: scale = max|row| / 127, at least 1e-8, and q = rint(row / scale). The maximum, IEEE division and
    rint give the same bits on every host.
    """
    scale = np.maximum(np.abs(rows).max(axis=1) / np.float32(127), _SMALLEST_SCALE)
    quantized = np.clip(np.rint(rows / scale[:, None]), -127, 127)
    return quantized.astype(np.int8), scale


def _write_rows(checkpoint: Checkpoint, name: str, table: str, out: Path, block_values: int) -> None:
    blocks = _blocks(checkpoint.shape(name), block_values)
    with (out / rows_file(table)).open("wb") as rows_out, (out / scale_file(table)).open("wb") as scales_out:
        for block in track(blocks, f"table {name}", len(blocks)):
            quantized, scale = quantize_rows(_finite(checkpoint, name, block))
            rows_out.write(quantized.data)
            scales_out.write(scale.astype(FLOAT).data)


def _write_floats(checkpoint: Checkpoint, name: str, path: Path, block_values: int) -> None:
    with path.open("wb") as out:
        for block in _blocks(checkpoint.shape(name), block_values):
            out.write(_finite(checkpoint, name, block).astype(FLOAT).data)


def _finite(checkpoint: Checkpoint, name: str, block: slice) -> np.ndarray:
    rows = checkpoint.float32(name, block)
    if not np.isfinite(rows).all():
        raise UserError(f"{name} holds a value that is infinite or not a number: the checkpoint is damaged")
    return rows


def _blocks(shape: tuple[int, ...], block_values: int) -> list[slice]:
    size = max(1, block_values // math.prod(shape[1:]))
    return [slice(start, min(start + size, shape[0])) for start in range(0, shape[0], size)]


def _meta(checkpoint: Checkpoint) -> Meta:
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
    )
