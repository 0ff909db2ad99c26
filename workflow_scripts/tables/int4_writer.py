"""Makes the raw gather dump on the 4-bit grid; `int4.py` reads it, so that readers do not depend on this code."""

import logging
from pathlib import Path

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.quantize.qat_grid import recover_grid
from workflow_scripts.quantize.quality import GridFit
from workflow_scripts.tables.dump import EMBED, META, PER_LAYER
from workflow_scripts.tables.int4 import BLOCK_SIZE, LAYOUT, STEP, codes_file, steps_file
from workflow_scripts.tables.streams import BLOCK_VALUES, meta_of, write_projection
from workflow_scripts.threads import in_order

_LOG = logging.getLogger(__name__)


def write_int4_tables(
    checkpoint: Checkpoint, out: Path, block_values: int = BLOCK_VALUES, threads: int = 1
) -> None:
    """Fill the folder `out` with the seven files of the dump (see `int4.py`), streamed in blocks of rows.

    The bytes do not depend on `threads`. Raises UserError naming tensor, row and block where a value is off the 4-bit
    grid or not finite.
    """
    for name, table in (("embed_tokens.weight", EMBED), ("embed_tokens_per_layer.weight", PER_LAYER)):
        fit = _write_table(checkpoint, name, table, out, block_values, threads)
        share = fit.exact / fit.weights
        _LOG.info("%s: %.4f%% kept to the bit, at most %.4f of a step off", name, 100 * share, fit.deviation)
    write_projection(checkpoint, out, block_values)
    write_json(out / META, meta_of(checkpoint).to_json() | LAYOUT)


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes int8 [n, K] in -8..7 -> uint8 [n, K / 2], two in a byte, the low nibble first."""
    nibbles = (codes + np.int8(8)).view(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _write_table(
    checkpoint: Checkpoint, name: str, table: str, out: Path, block_values: int, threads: int
) -> GridFit:
    blocks, fit = list(row_blocks(checkpoint.shape(name), block_values)), GridFit()

    def work(block: slice) -> tuple[np.ndarray, np.ndarray, GridFit]:
        found = recover_grid(checkpoint.float32(name, block), BLOCK_SIZE, name, block.start)
        return pack_codes(found.codes), found.steps.astype(STEP), found.quality.fit

    with (out / codes_file(table)).open("wb") as codes_out, (out / steps_file(table)).open("wb") as steps_out:
        for codes, steps, kept in track(in_order(work, blocks, threads), f"table {name}", len(blocks)):
            codes_out.write(codes.data)
            steps_out.write(steps.data)
            fit += kept
    return fit
