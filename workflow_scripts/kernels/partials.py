"""The contract of a `head_argmax_metal` and the host's side of it: one token from the tiles' maxima, in numpy."""

import numpy as np

TILE_ROWS = 8
"""Rows of the vocabulary behind one partial maximum (published contract: 262144 / 8 = 32768 partials)."""


def chosen_token(values: np.ndarray, indices: np.ndarray) -> int:
    """partial_values [n] and partial_indices [n], tiles in order -> the token id; of equal values the lowest id.

    numpy's argmax returns the first maximum, and the first tile that holds it has the lowest ids.
    """
    return int(indices[np.argmax(values)])
