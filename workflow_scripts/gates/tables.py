"""Gate `tables`: the raw gather dump holds the checkpoint's rows, each within half a step of its own scale.

Judged from the two sets of files alone, by the definition of symmetric int8 rows; the code that wrote the dump has
no part in it. Blocks of rows, so that the 2.3 GB of E2B's per-layer rows cost tens of megabytes.
"""

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.tables_common import gate_exact_parts, row_figures, same_shape, worst
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.tables.raw import RawTables

_SMALLEST_SCALE = 1e-8  # of the published dumps: what an all-zero row has


def gate_tables(verdict: Verdict, tables: RawTables, checkpoint: Checkpoint) -> None:
    """Every row of the two int8 tables, the projection and its norm, and what `meta.json` says."""
    quantized = {
        "embed_tokens.weight": (tables.embed_rows, tables.embed_scale),
        "embed_tokens_per_layer.weight": (tables.per_layer_rows, tables.per_layer_scale),
    }
    for name, (rows, scale) in quantized.items():
        if same_shape(verdict, checkpoint, name, rows.shape):
            _check_rows(verdict, checkpoint, name, rows, scale)
    gate_exact_parts(verdict, tables, checkpoint)


def _check_rows(
    verdict: Verdict, checkpoint: Checkpoint, name: str, rows: np.ndarray, scale: np.ndarray
) -> None:
    """Per row: the scale is the largest weight / 127, and no weight is further off than half a step.

    Without the first, huge scales would make huge errors right. A scale is one float32 division, which is right to half
    an ulp. A weight may be off by half a step, and by one ulp of the row's largest weight, since the quotient that was
    rounded to an integer had itself been rounded: up to 127, by 2^-18, which times the step is 1.008 of half that ulp.
    """

    def excess(block: slice) -> tuple[np.ndarray, np.ndarray]:
        weights, steps = checkpoint.float32(name, block).astype(np.float64), scale[block].astype(np.float64)
        largest = np.abs(weights).max(axis=1)
        expected = np.maximum(largest / 127, _SMALLEST_SCALE)
        error = np.abs(rows[block] * steps[:, None] - weights).max(axis=1)
        return np.abs(steps - expected) / _ulp(expected), (error - _ulp(largest)) / steps

    scales, errors = row_figures(excess, rows.shape)
    value, where = worst(scales)
    verdict.at_most(f"{name}: error of a scale, in ulp", value, 0.5, where)
    value, where = worst(errors)
    verdict.at_most(f"{name}: error beyond one ulp, in steps of its row", value, 0.5, where)


def _ulp(values: np.ndarray) -> np.ndarray:
    return np.spacing(values.astype(np.float32)).astype(np.float64)
