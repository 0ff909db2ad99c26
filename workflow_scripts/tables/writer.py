"""Makes the raw gather dump in int8; `raw.py` reads it, so that readers do not depend on this code."""

from pathlib import Path

import ml_dtypes
import numpy as np
from numba import njit

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.tables.dump import EMBED, FLOAT, META, PER_LAYER
from workflow_scripts.tables.raw import rows_file, scale_file
from workflow_scripts.tables.streams import BLOCK_VALUES, meta_of, not_finite, write_projection
from workflow_scripts.threads import in_order

# Of the published dumps; it also keeps an all-zero row from dividing by zero.
_SMALLEST_SCALE = np.float32(1e-8)
_LARGEST = np.float32(127)
_INFINITY = 0x7F800000  # as float32 bits; NaN is above it


def write_raw_tables(
    checkpoint: Checkpoint, out: Path, block_values: int = BLOCK_VALUES, threads: int = 1
) -> None:
    """Fill the folder `out` with the seven files of the dump (see `raw.py`), streamed in blocks of rows.

    The bytes do not depend on `threads`. Raises UserError naming tensor and row of a value that is not finite.
    """
    write_rows(checkpoint, "embed_tokens.weight", EMBED, out, block_values, threads)
    write_rows(checkpoint, "embed_tokens_per_layer.weight", PER_LAYER, out, block_values, threads)
    write_projection(checkpoint, out, block_values)
    write_json(out / META, meta_of(checkpoint).to_json())


def write_rows(
    checkpoint: Checkpoint, name: str, table: str, out: Path, block_values: int, threads: int
) -> None:
    """One table of the dump, its two files in the folder `out`. Raises UserError as `write_raw_tables` does."""
    blocks = list(row_blocks(checkpoint.shape(name), block_values))

    def work(block: slice) -> tuple[np.ndarray, np.ndarray]:
        # Mapped anew for each block, so that no pages stay in the process.
        return quantize_rows(checkpoint.array(name)[block], name, block.start)

    with (out / rows_file(table)).open("wb") as rows_out, (out / scale_file(table)).open("wb") as scales_out:
        for quantized, scales in track(in_order(work, blocks, threads), f"table {name}", len(blocks)):
            rows_out.write(quantized.data)
            scales_out.write(scales.astype(FLOAT).data)


def quantize_rows(rows: np.ndarray, name: str, first_row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 per row: [n, K] of any stored dtype -> int8 [n, K] in -127..127 and float32 scales [n].

    All in float32: scale = max|row| / 127, at least 1e-8, and q = rint(row / scale). The maximum, IEEE division and
    rint give the same bits on every host. Raises UserError naming tensor and row of a value that is not finite; the
    rows begin at row `first_row` of the tensor `name`.
    """
    if rows.dtype == ml_dtypes.bfloat16:
        bits, shift = rows.view(np.uint16), 16  # bfloat16 is the upper half of float32
    else:
        bits, shift = rows.astype(np.float32, copy=False).view(np.uint32), 0
    quantized, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
    bad = _quantize(bits, np.uint32(shift), quantized, scales)
    if bad >= 0:
        raise not_finite(name, first_row + bad)
    return quantized, scales


@njit(cache=True, nogil=True, error_model="numpy")
def _quantize(bits: np.ndarray, shift: np.uint32, quantized: np.ndarray, scales: np.ndarray) -> int:
    """Fill `quantized` int8 [n, K] and `scales` float32 [n]; the first row with a value that is not finite, or -1.

    `bits` [n, K] shifted to the left are those of float32. A row is widened once, into memory that stays in the
    processor's cache. No quotient needs to be cut: the largest is 127 (1 + 2^-23) at most, by the scale's rounding.
    """
    row_bits = np.empty(bits.shape[1], np.uint32)
    row = row_bits.view(np.float32)
    peak_bits = np.empty(1, np.uint32)
    for n in range(bits.shape[0]):
        peak = np.uint32(0)
        for i in range(bits.shape[1]):
            row_bits[i] = np.uint32(bits[n, i]) << shift
            peak = max(peak, row_bits[i] & np.uint32(0x7FFFFFFF))  # without the sign ordered as integers
        if peak >= _INFINITY:
            return n
        peak_bits[0] = peak
        scale = max(peak_bits.view(np.float32)[0] / _LARGEST, _SMALLEST_SCALE)
        scales[n] = scale
        for i in range(bits.shape[1]):
            quantized[n, i] = np.int8(np.rint(row[i] / scale))
    return -1
