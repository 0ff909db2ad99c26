"""Linear quantization: symmetric integers, one float16 step per block along a row; a weight is code x step.

Two schemes set the step from a block's peak, its largest magnitude. They are those of coreai-opt, whose names say more
than they do: neither searches for a better step, and the second saturates.

- `clipping` (`symmetric_with_clipping`): codes -7..7 at 4 bits, step = peak / 7: the peak is a level.
- `symmetric`: codes -8..7 at 4 bits, step = peak / 7.5: a negative peak is rounded to -8, a positive one cut to 7, and
  both are half a step off.

The step is rounded to float16 before the codes are chosen, so that these suit the step that is stored. A block of
zeros has the step 0. Below 2^-14, where float16 loses its relative precision, the step is rounded up: rounded down, it
could cut the peak by whole steps, or be 0.

The bytes are the same on every host: a maximum does not depend on its order, all else that is stored is made by single
correctly rounded operations, and sums (in the report) run in a fixed order in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.quality import GridFit, Quality

_SMALLEST_NORMAL = 2.0**-14  # of float16
_LARGEST = 65504  # of float16
_INFINITY = 0x7C00  # its float16 code


@dataclass(frozen=True)
class LinearBlock:
    """Quantized rows: `codes` int8 [N, K], `steps` float16 [N, K / block_size], and how well they keep the weights."""

    codes: np.ndarray
    steps: np.ndarray
    quality: Quality


def quantize_linear(
    rows: np.ndarray, bits: int, scheme: str, block_size: int, name: str, first_row: int = 0
) -> LinearBlock:
    """Quantize `rows` float32 [N, K], which begin at row `first_row` of the tensor `name`.

    No weight moves by more than half a step, except for peaks in scheme `symmetric`. Raises UserError naming tensor,
    row and block where a weight is not finite or a step lies beyond float16, and the tensor where its rows are no whole
    blocks.
    """
    highest = (1 << (bits - 1)) - 1
    lowest, levels_to_peak = {"clipping": (-highest, highest), "symmetric": (-highest - 1, highest + 0.5)}[
        scheme
    ]
    check_blocks(rows.shape, block_size, name)
    steps = round_steps(block_peaks(rows, block_size, name, first_row) / levels_to_peak, name, first_row)
    codes = np.empty(rows.shape, np.int8)
    _choose_codes(
        rows.reshape(-1, block_size),
        steps.astype(np.float32).reshape(-1),
        np.float32(lowest),
        np.float32(highest),
        codes.reshape(-1, block_size),
    )
    return measured(rows, codes, steps)


def check_blocks(shape: tuple[int, ...], block_size: int, name: str) -> None:
    """Raise UserError where a tensor's rows cannot be cut into whole blocks."""
    if len(shape) != 2 or 0 in shape or shape[1] % block_size:
        raise UserError(
            f"{name} has shape {list(shape)}: a step per block of {block_size} needs a matrix whose columns are a "
            f"multiple of {block_size}; use a recipe without blocks for this model"
        )


def block_peaks(rows: np.ndarray, block_size: int, name: str, first_row: int) -> np.ndarray:
    """Largest magnitude of every block of `rows` float32 [N, K]: float64 [N, K / block_size].

    Raises UserError naming tensor, row and block where a weight is not finite.
    """
    peaks = _largest_magnitudes(rows.view(np.uint32).reshape(-1, block_size)).view(np.float32)
    peaks = peaks.reshape(len(rows), -1)
    if not np.isfinite(peaks).all():
        bad = np.argwhere(~np.isfinite(peaks))
        raise UserError(
            f"{where(name, bad[0], first_row)} holds a weight that is infinite or not a number: the checkpoint is "
            "damaged"
        )
    return peaks.astype(np.float64)


def round_steps(steps: np.ndarray, name: str, first_row: int) -> np.ndarray:
    """Float64 steps [N, B] as float16: to the nearest, and below 2^-14 up. Raises UserError where one is too large."""
    codes = _float16_codes(steps.reshape(-1)).reshape(steps.shape)
    if codes.max() >= _INFINITY:
        bad = np.argwhere(codes >= _INFINITY)
        raise UserError(
            f"{where(name, bad[0], first_row)} needs a step of {steps[tuple(bad[0])]:.6g}, beyond {_LARGEST}, the "
            "largest float16: use recipe fp32 for this model"
        )
    return codes.astype(np.uint16).view(np.float16)


def measured(rows: np.ndarray, codes: np.ndarray, steps: np.ndarray) -> LinearBlock:
    """Codes int8 [N, K] and steps float16 [N, B] together with how well they keep `rows` float32 [N, K]."""
    block_size = rows.shape[1] // steps.shape[1]
    signal, error, exact, deviation = _measure(
        rows.reshape(-1, block_size),
        codes.reshape(-1, block_size),
        steps.astype(np.float32).reshape(-1),
    )
    return LinearBlock(codes, steps, Quality(signal, error, GridFit(rows.size, exact, deviation)))


def where(name: str, block: Sequence[int], first_row: int) -> str:
    """A block's place as messages name it; `block` is (row, block) in rows that begin at `first_row`."""
    return f"{name}, row {first_row + int(block[0])}, block {int(block[1])},"


# The compiled loops take blocks [N * B, block_size]: in two plain indices they are vectorized (ten times as fast).


@njit(cache=True, nogil=True)
def _largest_magnitudes(bits: np.ndarray) -> np.ndarray:
    """Of the float32 numbers with these bits: without the sign they are ordered as integers, with NaN above all."""
    peaks = np.zeros(bits.shape[0], np.uint32)
    for block in range(bits.shape[0]):
        peak = np.uint32(0)
        for i in range(bits.shape[1]):
            peak = max(peak, bits[block, i] & np.uint32(0x7FFFFFFF))
        peaks[block] = peak
    return peaks


@njit(cache=True, nogil=True)
def _float16_codes(numbers: np.ndarray) -> np.ndarray:
    """Codes int64 [n] of float64 numbers from 0 on as `round_steps` rounds them; infinity's or more for too large ones.

    By integers: numpy rounds one number at a time, which took longer than half of all else (measured).
    """
    codes = np.empty(len(numbers), np.int64)
    bits = numbers.view(np.int64)
    for i in range(len(numbers)):
        if numbers[i] < _SMALLEST_NORMAL:
            codes[i] = np.int64(np.ceil(numbers[i] * 2.0**24))
        else:  # to 10 bits behind the first, ties to even; the exponent counts from -15 instead of -1023
            codes[i] = ((bits[i] + 0x1FFFFFFFFFF + ((bits[i] >> 42) & 1)) >> 42) - (1008 << 10)
    return codes


@njit(cache=True, nogil=True, error_model="numpy")
def _choose_codes(
    blocks: np.ndarray, steps: np.ndarray, lowest: np.float32, highest: np.float32, codes: np.ndarray
) -> None:
    """Fill `codes` int8 with the nearest code of every weight, ties to even; all else is float32."""
    for block in range(blocks.shape[0]):
        step = steps[block] if steps[block] > 0 else np.float32(1)  # a block of zeros
        for i in range(blocks.shape[1]):
            codes[block, i] = np.int8(min(max(np.rint(blocks[block, i] / step), lowest), highest))


@njit(cache=True, nogil=True, error_model="numpy")
def _measure(blocks: np.ndarray, codes: np.ndarray, steps: np.ndarray) -> tuple[float, float, int, float]:
    """Sums of squares of the weights and of their errors, how many are exact, and the largest deviation in steps.

    Everything is kept per place in the block, which is a fixed order and needs no reduction in the inner loop.
    """
    size = blocks.shape[1]
    signals, errors, exacts = np.zeros(size), np.zeros(size), np.zeros(size, np.int32)
    deviations, decoded = np.zeros(size, np.float32), np.empty(size, np.float32)
    decoded_bits = decoded.view(np.int32)
    for block in range(blocks.shape[0]):
        step = steps[block]
        divisor = step if step > 0 else np.float32(1)
        for i in range(size):
            decoded[i] = np.float32(codes[block, i]) * step  # exact: 8 + 11 bits
            off = decoded[i] - blocks[block, i]
            signals[i] += np.float64(blocks[block, i]) * np.float64(blocks[block, i])
            errors[i] += np.float64(off) * np.float64(off)
            deviations[i] = max(deviations[i], abs(off) / divisor)
        for i in range(size):  # to bfloat16, ties to even
            decoded_bits[i] = (decoded_bits[i] + 0x7FFF + ((decoded_bits[i] >> 16) & 1)) & -0x10000
        for i in range(size):
            exacts[i] += decoded[i] == blocks[block, i]
    signal, error = 0.0, 0.0
    for i in range(size):
        signal += signals[i]
        error += errors[i]
    return signal, error, exacts.sum(), deviations.max()
