"""The grid of a checkpoint from quantization-aware training: every block of a row is levels -8..7 times one step.

The published weights are such products rounded to bfloat16 (`…-qat-q4_0-unquantized`, in all layer matrices, both
embeddings and the per-layer projection). A packer that sets the step from a block's peak leaves the grid wherever the
peak is not the level that it assumes; so here the level m of the peak is sought, block by block: the first m of 1..8
at which every weight is a level of the step peak / m.

Tolerance. A weight is k x step x (1 + e) and the peak m x step x (1 + d), where bfloat16, with 8 significant bits,
rounds by |e|, |d| <= u = 2^-8 / (1 + 2^-8). So weight / (peak / m) is off k by at most |k| (2 u / (1 - u)), which is
|k| 2^-7. Below 8 these are together with the weight's own 14/128 at most, and the levels of a wrong m are 1/8 or more
off: none is taken by accident of rounding. Then the levels are exact: between half a unit of the last place below and
above each weight lie the steps at which it decodes to itself, and a block without a common one is off the grid.

The step that is kept is the least-squares step, moved between those bounds, as the nearest float16 number that also is
between them, if there is any: then the whole block decodes to the stored bfloat16 numbers. Else float16 moves the step
by 2^-11 of itself at most, and a decoded value is within 8 (2^-8 + 2^-11), 3.5% of a step, of the stored weight.
"""

import numpy as np
from numba import njit

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.linear import (
    LinearBlock,
    block_peaks,
    check_blocks,
    measured,
    round_steps,
    where,
)

_LOWEST, _HIGHEST = np.float32(-8), np.float32(7)
_ROUNDED_TWICE = 2.0**-22  # what rounding to float32 before bfloat16 can add
_TOLERANCE = np.float32(2.0**-7 + _ROUNDED_TWICE)  # per level
_INFINITY = 0x7F800000  # as float32 bits
_SMALLEST_PEAK = 2.0**-25  # below it no step is a float16 number but 0
_LARGEST_DEVIATION = 0.04  # of a step, from the checkpoint to a decoded value


def recover_grid(rows: np.ndarray, block_size: int, name: str, first_row: int = 0) -> LinearBlock:
    """Codes and steps of `rows` float32 [N, K] that lie on a 4-bit grid; they begin at row `first_row` of `name`.

    For any matrix that is streamed in blocks of rows: of the layers, the embeddings, the per-layer projection.

    Raises UserError naming tensor, row and block where one is off the grid (with the best deviation in steps), has a
    weight that is not finite, or a step that float16 does not hold; and the tensor where its rows are no whole blocks.
    """
    check_blocks(rows.shape, block_size, name)
    peaks = block_peaks(rows, block_size, name, first_row)
    grid = peaks.shape

    def place(block: int) -> str:
        return where(name, np.unravel_index(block, grid), first_row)

    tiny = np.flatnonzero((peaks > 0) & (peaks < _SMALLEST_PEAK))
    if len(tiny):
        raise _too_small(place(tiny[0]), peaks.reshape(-1)[tiny[0]])
    blocks = rows.reshape(-1, block_size)
    bits = blocks.view(np.int32)
    codes = np.empty(blocks.shape, np.int8)
    smallest = _smallest_magnitudes(bits).view(np.float32)
    misfit = _find_levels(blocks, peaks.astype(np.float32).reshape(-1), smallest, codes)
    if misfit >= 0:
        raise _off_the_grid(place(misfit), blocks[misfit])
    steps, lowest, highest = _step_ranges(blocks, bits, codes)
    empty = np.flatnonzero(lowest > highest * (1 + _ROUNDED_TWICE))
    if len(empty):
        raise _off_the_grid(place(empty[0]), blocks[empty[0]])
    kept = _round_inside(
        round_steps(np.minimum(np.maximum(steps, lowest), highest).reshape(grid), name, first_row),
        lowest.reshape(grid),
        highest.reshape(grid),
    )
    found = measured(rows, codes.reshape(rows.shape), kept)
    if found.quality.fit.deviation > _LARGEST_DEVIATION:
        worst = _worst_block(blocks, codes, kept.reshape(-1))
        raise _too_small(place(worst), steps[worst])
    return found


def _round_inside(rounded: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> np.ndarray:
    """Float16 numbers that were rounded from inside their ranges, moved back inside where a float16 number is there.

    Of the two float16 numbers around a number of a range, one is in the range, if any is.
    """
    beside = rounded.view(np.int16) + np.where(rounded < lowest, 1, -1)
    other = np.maximum(beside, 0).astype(np.int16).view(np.float16)
    outside = (rounded < lowest) | (rounded > highest)
    return np.where(outside & (lowest <= other) & (other <= highest), other, rounded)


def _off_the_grid(place: str, block: np.ndarray) -> UserError:
    level, deviation = _best_fit(block)
    return UserError(
        f"{place} is off the 4-bit grid: at best, with its peak at level {level}, a weight is {deviation:.3f} of a "
        f"step off its level. The checkpoint is not from quantization-aware training in blocks of {len(block)}: use "
        "recipe int4-linear-b32, and tables of form raw_tables"
    )


def _too_small(place: str, step: float) -> UserError:
    return UserError(
        f"{place} needs a step of at most {step:.3g}, which float16 does not hold well enough to keep the 4-bit grid: "
        "use recipe fp32 for this model"
    )


def _worst_block(blocks: np.ndarray, codes: np.ndarray, steps: np.ndarray) -> int:
    """The block with the largest deviation in steps."""
    divisors = np.where(steps > 0, steps, 1).astype(np.float64)[:, None]
    return int(np.abs(blocks / divisors - codes).max(axis=1).argmax())


def _best_fit(block: np.ndarray) -> tuple[int, float]:
    """The level of the peak at which a block's worst weight is the least off the levels, and that in steps."""
    peak = np.abs(block.astype(np.float64)).max()
    deviations = {}
    for level in range(1, 9):
        exact = block.astype(np.float64) / (peak / level)
        deviations[level] = float(np.abs(exact - np.clip(np.rint(exact), _LOWEST, _HIGHEST)).max())
    best = min(deviations, key=deviations.__getitem__)
    return best, deviations[best]


# The compiled loops take blocks [n, size] in two plain indices, one thing at a time, so that they are vectorized.


@njit(cache=True, nogil=True, error_model="numpy")
def _find_levels(blocks: np.ndarray, peaks: np.ndarray, smallest: np.ndarray, codes: np.ndarray) -> int:
    """Fill `codes` int8 [n, size]; the index of the first block off the grid, or -1.

    Where the smallest weight that is not 0 is at level 1, as in nearly every block, the peak's level is their ratio:
    with a lower one the smallest weight would be between 0 and 1. Other blocks try all levels.
    """
    for block in range(blocks.shape[0]):
        peak = peaks[block] if peaks[block] > 0 else np.float32(1)  # a block of zeros fits any level
        level = int(np.rint(peak / smallest[block]))
        if not (1 <= level <= 8 and _fits(blocks, block, np.float32(level) / peak)):
            level = 1
            while level <= 8 and not _fits(blocks, block, np.float32(level) / peak):
                level += 1
            if level > 8:
                return block
        scale = np.float32(level) / peak
        for i in range(blocks.shape[1]):
            codes[block, i] = np.int8(np.rint(blocks[block, i] * scale))
    return -1


@njit(cache=True, inline="always")
def _fits(blocks: np.ndarray, block: int, scale: np.float32) -> bool:
    """Whether every weight x scale is a level, as far as rounding lets it."""
    off = np.int32(0)
    for i in range(blocks.shape[1]):
        exact = blocks[block, i] * scale
        code = np.rint(exact)
        off |= np.int32((abs(exact - code) > _TOLERANCE * abs(code)) | (code > _HIGHEST))
    return off == 0


@njit(cache=True, nogil=True)
def _smallest_magnitudes(bits: np.ndarray) -> np.ndarray:
    """Bits of each block's smallest magnitude above 0, or of infinity, from those of its float32 numbers, int32."""
    smallest = np.empty(bits.shape[0], np.int32)
    for block in range(bits.shape[0]):
        found = np.int32(_INFINITY)
        for i in range(bits.shape[1]):
            magnitude = bits[block, i] & np.int32(0x7FFFFFFF)
            found = min(found, magnitude if magnitude > 0 else np.int32(_INFINITY))
        smallest[block] = found
    return smallest


@njit(cache=True, nogil=True, error_model="numpy")
def _step_ranges(
    blocks: np.ndarray, bits: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per block the least-squares step float64, and the lowest and highest, float32, at which it decodes to itself.

    `bits` int32 are those of `blocks` float32. What rounds to a bfloat16 number lies within half a unit of its last
    place, which is 2^15 in these bits: including the ends where that place is even, and a little less where it is odd.
    """
    count, size = blocks.shape
    steps = np.zeros(count)
    lowest, highest = np.zeros(count, np.int32), np.zeros(count, np.int32)
    levels, products = np.empty(size, np.int32), np.empty(size)
    lows, highs = np.empty(size, np.float32), np.empty(size, np.float32)
    low_bits, high_bits = lows.view(np.int32), highs.view(np.int32)
    for block in range(count):
        squares = np.int32(0)
        for i in range(size):
            levels[i] = abs(np.int32(codes[block, i]))
            squares += levels[i] * levels[i]
        for i in range(size):
            products[i] = np.float64(levels[i]) * np.float64(abs(blocks[block, i]))  # exact
        steps[block] = _folded_sum(products) / max(squares, 1)
        for i in range(size):
            magnitude = bits[block, i] & np.int32(0x7FFFFFFF)
            half = np.int32(0x8000) - ((magnitude >> np.int32(16)) & np.int32(1)) * np.int32(4)
            low_bits[i] = max(magnitude - half, np.int32(0))
            high_bits[i] = (
                magnitude + half if magnitude > 0 else np.int32(_INFINITY)
            )  # 0 is level 0 of any step
        for i in range(size):
            level = np.float32(max(levels[i], np.int32(1)))
            lows[i] /= level
            highs[i] /= level
        low, high = np.int32(0), np.int32(_INFINITY)
        for i in range(size):  # as integers, as which positive numbers have the same order
            low = max(low, low_bits[i])
            high = min(high, high_bits[i])
        lowest[block], highest[block] = low, high
    return steps, lowest.view(np.float32), highest.view(np.float32)


@njit(cache=True, inline="always")
def _folded_sum(terms: np.ndarray) -> float:
    """The sum, folding the second half onto the first until one is left: a fixed order; `terms` are used up."""
    left = len(terms)
    while left > 1:
        kept = (left + 1) // 2
        for i in range(left - kept):
            terms[i] += terms[kept + i]
        left = kept
    return terms[0]
