"""Palettes: k-means of the weights in one dimension, with a codebook per group of output rows.

A stored 16-bit weight has at most 65,536 different values, so counting them is lossless, and the clusters are sought
over a few thousand counted values instead of the weights (see `kmeans.py`). They are optimal, or within a tolerance of
it, as real centroids; these are then rounded to float16, and every weight takes the nearest entry. So the stored result
need not be the best of all float16 codebooks: the rounding adds 0.05 to 0.25% of the squared error at 8 bits and less
than 0.001% at 4 (measured at standard deviations of 1e-4 to 0.02; below 1e-5 float16 itself is too coarse).

The bytes are the same on every host and for every number of threads.
"""

from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.kmeans import palettize_codes, palettize_values
from workflow_scripts.quantize.quality import Quality

_CODED = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


@dataclass(frozen=True)
class PaletteBlock:
    """Palettized rows: `indices` uint8 [N, K], `codebook` float16 [N / group_size, 2**bits], each row ascending.

    `quality` tells how much of the weights they keep.
    """

    indices: np.ndarray
    codebook: np.ndarray
    quality: Quality


def palettize(
    rows: np.ndarray, bits: int, group_size: int, name: str, tolerance: float = 0.0
) -> PaletteBlock:
    """Palettize `rows` [N, K] (bfloat16, float16 or float32, as stored), one codebook per `group_size` rows.

    Before the codebook is rounded, the squared error is at most 1 + `tolerance` times the least possible one.

    Raises UserError naming the tensor where N is not a multiple of `group_size`, a weight is not finite, or one lies
    outside float16.
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"palette indices are stored in bytes: bits must be 1 to 8, not {bits}")
    check_groups(rows.shape, group_size, name)
    groups = np.ascontiguousarray(rows).reshape(len(rows) // group_size, -1)
    indices = np.empty(groups.shape, np.uint8)
    entries, squares = np.empty((len(groups), 1 << bits)), np.empty((len(groups), 2))
    if rows.dtype in _CODED:
        decoded = _decoded(rows.dtype)
        done = palettize_codes(groups.view(np.uint16), decoded, tolerance, indices, entries, squares)
    elif rows.dtype == np.float32:
        done = _palettize_floats(groups, tolerance, indices, entries, squares)
    else:
        raise ValueError(f"no palette is made of weights stored as {rows.dtype}")
    if done < len(groups):
        raise UserError(f"{name} holds a weight that is infinite or not a number: the checkpoint is damaged")
    if not np.isfinite(entries).all():
        raise UserError(
            f"{name} has weights beyond 65504, the largest float16, so no float16 codebook can hold them"
        )
    quality = Quality()
    for signal, error in squares.tolist():
        quality.add(signal, error)
    return PaletteBlock(indices.reshape(rows.shape), entries.astype(np.float16), quality)


def check_groups(shape: tuple[int, ...], group_size: int, name: str) -> None:
    """Raise UserError where a tensor cannot be cut into groups of `group_size` whole rows."""
    if len(shape) != 2 or 0 in shape or shape[0] % group_size:
        raise UserError(
            f"{name} has shape {list(shape)}: a palette per {group_size} rows needs a matrix whose rows are a multiple "
            f"of {group_size}; use a recipe without palettes for this model"
        )


def _palettize_floats(
    groups: np.ndarray, tolerance: float, indices: np.ndarray, entries: np.ndarray, squares: np.ndarray
) -> int:
    """The same as `palettize_codes` for float32, whose values are counted by sorting."""
    for group, weights in enumerate(groups):
        values, inverse, counts = np.unique(
            weights.astype(np.float64), return_inverse=True, return_counts=True
        )
        if not np.isfinite(values[[0, -1]]).all():  # ascending: what is not finite lies at an end
            return group
        nearest = palettize_values(
            values, counts.astype(np.float64), tolerance, entries[group], squares[group]
        )
        indices[group] = nearest[inverse]
    return len(groups)


@cache
def _decoded(dtype: np.dtype) -> np.ndarray:
    """The value of every 16-bit code: float64 [65536]."""
    with np.errstate(invalid="ignore"):  # codes that are not numbers
        return np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)
