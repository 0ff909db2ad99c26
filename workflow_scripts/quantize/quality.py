"""How much of the weights an encoding keeps: sums of squares in a fixed order, and the ratio in decibels."""

import math
from dataclasses import dataclass

import numpy as np
from numba import njit


@dataclass(frozen=True)
class GridFit:
    """How weights lie on the grid of their codes, code x step.

    `exact` of `weights` are bfloat16 numbers and are had back by rounding code x step to bfloat16; `deviation` is the
    largest |weight / step - code| (0 in blocks of zeros).
    """

    weights: int = 0
    exact: int = 0
    deviation: float = 0.0

    def __add__(self, other: "GridFit") -> "GridFit":
        return GridFit(
            self.weights + other.weights, self.exact + other.exact, max(self.deviation, other.deviation)
        )


class Quality:
    """Running sums of squares: of the weights (`signal`) and of their deviation in storage (`error`), in float64.

    Everything is added in one fixed order, so the figures do not depend on threads or the host. `fit` is there where
    the storage is a grid.
    """

    def __init__(self, signal: float = 0.0, error: float = 0.0, fit: GridFit | None = None) -> None:
        self.signal = signal
        self.error = error
        self.fit = fit

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


@njit(cache=True, nogil=True)
def _add_squares(
    original: np.ndarray, stored: np.ndarray, signal: float, error: float
) -> tuple[float, float]:
    for i in range(len(original)):
        weight = np.float64(original[i])
        deviation = weight - np.float64(stored[i])
        signal += weight * weight
        error += deviation * deviation
    return signal, error
