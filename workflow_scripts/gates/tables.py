"""Gate `tables`: the raw gather dump holds the checkpoint's rows, each within half a step of its own scale.

Judged from the two sets of files alone, by the definition of symmetric int8 rows; the code that wrote the dump has
no part in it. Blocks of rows, so that the 2.3 GB of E2B's per-layer rows cost tens of megabytes.
"""

import math
from collections.abc import Callable

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.blocks import row_blocks
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.tables.raw import RawTables

_SMALLEST_SCALE = 1e-8  # of the published dumps: what an all-zero row has
_FACTOR_TOLERANCE = 1e-12  # square roots in float64


def gate_tables(verdict: Verdict, tables: RawTables, checkpoint: Checkpoint) -> None:
    """Every row of the two int8 tables, the projection and its norm, and the sizes and factors of `meta.json`."""
    quantized = {
        "embed_tokens.weight": (tables.embed_rows, tables.embed_scale),
        "embed_tokens_per_layer.weight": (tables.per_layer_rows, tables.per_layer_scale),
    }
    for name, (rows, scale) in quantized.items():
        if _same_shape(verdict, checkpoint, name, rows):
            _check_rows(verdict, checkpoint, name, rows, scale)
    exact = {
        "per_layer_model_projection.weight": tables.projection,
        "per_layer_projection_norm.weight": tables.projection_norm,
    }
    for name, values in exact.items():
        if _same_shape(verdict, checkpoint, name, values):
            _check_equal(verdict, checkpoint, name, values)
    _check_meta(verdict, tables, checkpoint)


def _same_shape(verdict: Verdict, checkpoint: Checkpoint, name: str, stored: np.ndarray) -> bool:
    expected = checkpoint.shape(name)
    if stored.shape != expected:
        verdict.check(f"{name}: shape", False, str(list(expected)), str(list(stored.shape)))
    return stored.shape == expected


def _check_rows(
    verdict: Verdict, checkpoint: Checkpoint, name: str, rows: np.ndarray, scale: np.ndarray
) -> None:
    """Per row: the scale is the largest weight / 127, and no weight is further off than half a step.

    Without the first, huge scales would make huge errors right. One float32 ulp is allowed to either: of the scale,
    and of the row's largest weight, since the quotient that was rounded to an integer had itself been rounded.
    """

    def excess(block: slice) -> tuple[np.ndarray, np.ndarray]:
        weights, steps = checkpoint.float32(name, block).astype(np.float64), scale[block].astype(np.float64)
        largest = np.abs(weights).max(axis=1)
        expected = np.maximum(largest / 127, _SMALLEST_SCALE)
        error = np.abs(rows[block] * steps[:, None] - weights).max(axis=1)
        return np.abs(steps - expected) / _ulp(expected), (error - _ulp(largest)) / steps

    scales, errors = _worst(excess, rows.shape)
    verdict.at_most(f"{name}: error of a scale, in ulp", scales[0], 1.0, f"row {scales[1]}")
    verdict.at_most(f"{name}: error beyond one ulp, in steps of its row", errors[0], 0.5, f"row {errors[1]}")


def _worst(
    figures: Callable[[slice], tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...]
) -> list[tuple[float, int]]:
    """Largest value (NaN is larger than any) and its row for each of two figures per row."""
    worst = [(-math.inf, 0), (-math.inf, 0)]
    for block in row_blocks(shape):
        for index, values in enumerate(figures(block)):
            row = int(np.argmax(values))  # the first NaN, where there is one
            if not values[row] <= worst[index][0] and not math.isnan(worst[index][0]):
                worst[index] = (float(values[row]), block.start + row)
    return worst


def _ulp(values: np.ndarray) -> np.ndarray:
    return np.spacing(values.astype(np.float32)).astype(np.float64)


def _check_equal(verdict: Verdict, checkpoint: Checkpoint, name: str, stored: np.ndarray) -> None:
    unequal = (
        block.start
        for block in row_blocks(stored.shape)
        if not np.array_equal(checkpoint.float32(name, block), stored[block])
    )
    first = next(unequal, None)
    found = "equal" if first is None else f"another value in the rows from {first} on"
    verdict.check(f"{name}: values", first is None, "equal", found)


def _check_meta(verdict: Verdict, tables: RawTables, checkpoint: Checkpoint) -> None:
    config, found = checkpoint.config, tables.meta.to_json()
    hidden, layers, size = config.hidden_size, config.num_hidden_layers, config.hidden_size_per_layer_input
    expected = {
        "V": config.vocab_size,
        "D": hidden,
        "PLD": layers * size,
        "L": layers,
        "ld": size,
        "embed_scale_main": hidden**0.5,
        "embed_scale_pl": size**0.5,
        "proj_scale": hidden**-0.5,
        "input_scale": 0.5**0.5,
        "rms_eps": config.rms_norm_eps,
    }
    wrong = [
        key
        for key, value in expected.items()
        if not math.isclose(found[key], value, rel_tol=_FACTOR_TOLERANCE)
    ]
    text = "equal" if not wrong else f"{wrong[0]} is {found[wrong[0]]}, not {expected[wrong[0]]}"
    verdict.check("meta.json", not wrong, "sizes and factors of the checkpoint", text)
