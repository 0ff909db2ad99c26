"""Gate `tables` over the layout `int4-b32`: every code times its step is the checkpoint's weight, but for rounding.

Judged from the two sets of files alone, by what the layout says of its bytes; the code that wrote the dump has no part
in it.

Bound. On the grid of the training a weight w is k x s, a level k in -8..7 times the step s of its block, rounded to
bfloat16: |k s - w| <= half a unit of w's last place, which is 2^-8 of the power of two at or below
|w|, and 2^-13 of that more where w was rounded to float32 first. The step t that is stored is s rounded to float16:
|t - s| <= r, half a unit of t's last place, and below 2^-14, where steps are rounded up, a whole unit. Together

    |k t - w| <= half a unit of w + |k| r.

A wrong level moves a value by t, of which the bound is 1/28 at most. Most weights do not need r: a share of 95% must be
had back to the bit by rounding k t to bfloat16. The nearest float16 step is off by 2^-12 of itself on average, bfloat16
numbers are 2^-7 of theirs apart, so a share of 2^-5 is lost, and 96.9% are had back (a public re-packing of E2B's
checkpoint has 96.84%); six standard deviations over the tiny model's 3072 blocks are 1.9%.
"""

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.tables_common import gate_exact_parts, row_figures, same_shape, worst
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.tables.int4 import Int4Tables

_BLOCK_SIZE = 32
_LEAST_SHARE = 0.95
_HALF_UNIT = np.float32(2.0**-8 * (1 + 2.0**-13))  # of bfloat16, as a part of the power of two below a number
_SMALLEST_NORMAL = np.float16(2.0**-14)


def gate_tables_int4(verdict: Verdict, tables: Int4Tables, checkpoint: Checkpoint) -> None:
    """Every value of the two tables, the projection and its norm, and what `meta.json` says."""
    packed = {
        "embed_tokens.weight": (tables.embed_codes, tables.embed_steps),
        "embed_tokens_per_layer.weight": (tables.per_layer_codes, tables.per_layer_steps),
    }
    for name, (codes, steps) in packed.items():
        if same_shape(verdict, checkpoint, name, (len(codes), 2 * codes.shape[1])):
            _check_values(verdict, checkpoint, name, codes, steps)
    gate_exact_parts(verdict, tables, checkpoint)


def _check_values(
    verdict: Verdict, checkpoint: Checkpoint, name: str, codes: np.ndarray, steps: np.ndarray
) -> None:
    """The bound of the module, and the share of weights that are had back to the bit."""
    rows, width = checkpoint.shape(name)

    def figures(block: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights = checkpoint.float32(name, block).reshape(-1, width // _BLOCK_SIZE, _BLOCK_SIZE)
        levels, step = _levels(codes[block]).reshape(weights.shape), steps[block][..., None]
        decoded = levels * step.astype(np.float32)  # exact: 4 + 11 bits
        error = np.abs(decoded - weights)
        allowed = _HALF_UNIT * _power_of_two(weights) + np.abs(levels) * _rounding(step)
        exact = _to_bfloat16(decoded) == weights
        with np.errstate(divide="ignore", invalid="ignore"):  # of a step 0 nothing is off, or infinitely
            deviation = np.where(error == 0, 0, error / step.astype(np.float32))
        return (error - allowed).max(axis=(1, 2)), deviation.max(axis=(1, 2)), exact.sum(axis=(1, 2))

    beyond, deviations, exact = row_figures(figures, (rows, width))
    value, where = worst(beyond)
    verdict.at_most(f"{name}: error beyond the rounding of weight and step", value, 0.0, where)
    verdict.at_least(f"{name}: share of weights kept to the bit", exact.sum() / (rows * width), _LEAST_SHARE)
    verdict.measured[f"{name}: largest error, in steps"] = worst(deviations)[0]


def _levels(packed: np.ndarray) -> np.ndarray:
    """uint8 [n, K / 2] -> float32 [n, K]: the low nibble first, each 8 above its level."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return nibbles.astype(np.float32) - 8


def _power_of_two(values: np.ndarray) -> np.ndarray:
    """The power of two at or below the magnitude of each float32 number: its exponent without sign and fraction."""
    return (values.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)


def _rounding(steps: np.ndarray) -> np.ndarray:
    """By how much a step in float16 can be off the step before rounding, float32."""
    with np.errstate(invalid="ignore"):  # a step that is not a number fails with its error
        units = np.spacing(steps).astype(np.float32)
    return np.where(np.abs(steps) < _SMALLEST_NORMAL, units, units / 2)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Float32 numbers rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
