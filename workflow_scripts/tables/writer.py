"""Makes the raw gather dump in int8; `raw.py` reads it, so that readers do not depend on this code."""

from pathlib import Path

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.tables.dump import EMBED, FLOAT, META, PER_LAYER
from workflow_scripts.tables.raw import rows_file, scale_file
from workflow_scripts.tables.streams import BLOCK_VALUES, finite_rows, meta_of, row_blocks, write_projection

_SMALLEST_SCALE = np.float32(
    1e-8
)  # of the published dumps; it also keeps an all-zero row from dividing by zero


def write_raw_tables(checkpoint: Checkpoint, out: Path, block_values: int = BLOCK_VALUES) -> None:
    """Fill the folder `out` with the seven files of the dump (see `raw.py`), streamed in blocks of rows.

    Raises UserError naming a tensor that holds a value which is not finite.
    """
    _write_rows(checkpoint, "embed_tokens.weight", EMBED, out, block_values)
    _write_rows(checkpoint, "embed_tokens_per_layer.weight", PER_LAYER, out, block_values)
    write_projection(checkpoint, out, block_values)
    write_json(out / META, meta_of(checkpoint).to_json())


def quantize_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 per row: finite float32 [n, K] -> int8 [n, K] in -127..127 and float32 scales [n].

    All in float32: scale = max|row| / 127, at least 1e-8, and q = rint(row / scale). The maximum, IEEE division and
    rint give the same bits on every host.
    """
    scale = np.maximum(np.abs(rows).max(axis=1) / np.float32(127), _SMALLEST_SCALE)
    quantized = np.clip(np.rint(rows / scale[:, None]), -127, 127)
    return quantized.astype(np.int8), scale


def _write_rows(checkpoint: Checkpoint, name: str, table: str, out: Path, block_values: int) -> None:
    blocks = row_blocks(checkpoint.shape(name), block_values)
    with (out / rows_file(table)).open("wb") as rows_out, (out / scale_file(table)).open("wb") as scales_out:
        for block in track(blocks, f"table {name}", len(blocks)):
            quantized, scale = quantize_rows(finite_rows(checkpoint, name, block))
            rows_out.write(quantized.data)
            scales_out.write(scale.astype(FLOAT).data)
