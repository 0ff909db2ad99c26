"""How much of the weights an encoding keeps: sums of squares in a fixed order, and the ratio in decibels."""

import math

import numpy as np
from numba import njit


class Quality:
    """Running sums of squares: of the weights (`signal`) and of their deviation in storage (`error`), in float64.

    Everything is added in one fixed order, so the figures do not depend on threads or the host.
    """

    def __init__(self, signal: float = 0.0, error: float = 0.0) -> None:
        self.signal = signal
        self.error = error

    def compare(self, original: np.ndarray, stored: np.ndarray) -> None:
        """Add a block: two contiguous float32 arrays of one shape."""
        self.signal, self.error = _add_squares(
            original.reshape(-1), stored.reshape(-1), self.signal, self.error
        )

    def add(self, signal: float, error: float) -> None:
        """Add sums that were made elsewhere."""
        self.signal += signal
        self.error += error

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio in dB, rounded to 0.01; None where the storage is exact."""
        if self.error == 0.0:
            return None
        return round(10 * math.log10(self.signal / self.error), 2)


@njit(cache=True)
def _add_squares(
    original: np.ndarray, stored: np.ndarray, signal: float, error: float
) -> tuple[float, float]:
    for i in range(len(original)):
        weight = np.float64(original[i])
        deviation = weight - np.float64(stored[i])
        signal += weight * weight
        error += deviation * deviation
    return signal, error
