"""Does every weight have the code that is nearest to it? A signal-to-noise ratio sees no few wrong codes, this does.

What a stored value may be off its weight by:
- plain numbers: nothing but the rounding to their type;
- palettes: it lies between the midpoints to the entries beside its own, which is to say that no other is nearer;
  Entries anywhere leave every weight a nearest one: that they are the means of their weights is asked apart.
- integers: half a step; and where a code is at its end, what float16 took from the step, 2^-11 of it at most, times the
  code, 2^(bits - 1) at most;
  A step is the block's largest weight through the levels that the scheme leaves it, rounded to float16: with larger
  steps every weight could have its nearest code, and levels would be idle;
- integers on the grid of the training: see `quantize/qat_grid.py`, 8 (2^-8 + 2^-11) of a step.
"""

import numpy as np

from workflow_scripts.quantize.recipes import Encoding, LinearEncoding
from workflow_scripts.quantize.weights import Dense, Linear, Matrix, Palette

_FLOAT16 = 2.0**-11
_BFLOAT16 = 2.0**-8
_SMALLEST = 2.0**-24  # of float16: steps below 2^-14 are rounded up to a multiple of it


def beyond_code(stored: Matrix, encoding: Encoding, rows: slice, weights: np.ndarray) -> float:
    """The furthest that a weight of `rows` is off its stored value, beyond what is allowed: above 0 one is wrong.

    `weights` float64 [n, K] are those rows of the checkpoint. NaN and infinity tell of a codebook that is none.
    """
    match stored:
        case Dense():
            return float(np.abs(stored.array[rows] - weights.astype(stored.array.dtype)).max())
        case Palette():
            return max(
                _beyond_entries(stored, span, weights[_within(span, rows)]) for span in _groups(stored, rows)
            )
        case Linear():
            on_grid = isinstance(encoding, LinearEncoding) and encoding.scheme == "qat"
            codes = _beyond_steps(stored, on_grid, rows, weights)
            return codes if on_grid else max(codes, _other_steps(stored, encoding, rows, weights))


def kept_to_the_bit(stored: Matrix, rows: slice, weights: np.ndarray) -> int:
    """How many weights of `rows` are had back by rounding the stored values to bfloat16, to the nearest."""
    bits = stored.dequantize(rows).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return int((rounded.view(np.float32) == weights).sum())


def off_means(stored: Palette, tolerance: float, rows: slice, weights: np.ndarray) -> float:
    """What moving the entries to the means of their weights would save of the squared error, as a share of the allowed.

    The worst palette of `rows`, which are whole groups; `weights` float64 [n, K] are those rows of the checkpoint. An
    error of at most 1 + `tolerance` times the least, with entries rounded to float16 afterwards, lies above the least
    by no more than `tolerance` times itself and the sum of the squared roundings, and so do entries that are means:
    above 1 they come from somewhere else. Measured: k-means 0.05 to 0.4, evenly spaced entries 1.3 to a million.
    """
    return max(
        _off_means(
            stored.codebook[span.start // stored.group_size].astype(np.float64),
            stored.indices[span].ravel(),
            weights[_within(span, rows)].ravel(),
            tolerance,
        )
        for span in _groups(stored, rows)
    )


def _off_means(entries: np.ndarray, indices: np.ndarray, weights: np.ndarray, tolerance: float) -> float:
    counts = np.bincount(indices, minlength=len(entries))
    sums = np.bincount(indices, weights, len(entries))
    means = np.divide(sums, counts, out=entries.copy(), where=counts > 0)
    saved = float((counts * np.square(entries - means)).sum())
    rounding = np.maximum(_FLOAT16 * np.abs(entries), _SMALLEST / 2)
    error = float(np.square(weights - entries[indices]).sum())
    allowed = tolerance * error + float((counts * np.square(rounding)).sum())
    return saved / allowed if saved else 0.0


def _groups(stored: Palette, rows: slice) -> list[slice]:
    """The rows of each palette group among `rows`."""
    size = stored.group_size
    firsts = range(rows.start - rows.start % size, rows.stop, size)
    return [slice(max(first, rows.start), min(first + size, rows.stop)) for first in firsts]


def _within(span: slice, rows: slice) -> slice:
    return slice(span.start - rows.start, span.stop - rows.start)


def _beyond_entries(stored: Palette, span: slice, weights: np.ndarray) -> float:
    entries = stored.codebook[span.start // stored.group_size].astype(np.float64)
    if not (np.diff(entries) >= 0).all():
        return np.inf
    # Equal entries stand for one.
    below = np.append(-np.inf, entries)[np.searchsorted(entries, entries, "left")]
    above = np.append(entries, np.inf)[np.searchsorted(entries, entries, "right")]
    codes = stored.indices[span]
    lowest, highest = ((entries + beside) / 2 for beside in (below, above))
    return float(np.maximum(lowest[codes] - weights, weights - highest[codes]).max())


def _beyond_steps(stored: Linear, on_grid: bool, rows: slice, weights: np.ndarray) -> float:
    steps = stored.steps[rows].astype(np.float64)
    share = 8 * (_BFLOAT16 + _FLOAT16) if on_grid else 0.5 + 2.0 ** (stored.bits - 1) * _FLOAT16
    error = np.abs(stored.dequantize(rows) - weights).reshape(*steps.shape, stored.block_size)
    return float((error - share * steps[..., None]).max())


def _other_steps(stored: Linear, encoding: Encoding, rows: slice, weights: np.ndarray) -> float:
    """How far a step is off the one that its block's peak gives, beyond float16's rounding."""
    steps = stored.steps[rows].astype(np.float64)
    clipping = isinstance(encoding, LinearEncoding) and encoding.scheme == "clipping"
    levels = (1 << (stored.bits - 1)) - (1.0 if clipping else 0.5)
    expected = np.abs(weights).reshape(*steps.shape, stored.block_size).max(-1) / levels
    return float((np.abs(steps - expected) - np.maximum(_FLOAT16 * expected, _SMALLEST)).max())
