"""Rotary cosines and sines of the first positions, apart from torch: bundles for the Neural Engine store them.

In decimal arithmetic, as the frequencies are: these numbers are stored, and the last bit of a library's cosine
depends on the processor and on the library.
"""

from decimal import Decimal, localcontext

import numpy as np

from workflow_scripts.checkpoint.text_config import RopeSpec
from workflow_scripts.model.frequencies import inverse_frequencies

_DIGITS = 40
_TINY = Decimal(10) ** -30  # far below half a unit in the last place of a float32 cosine
_TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502116")


def rotary_table(rope: RopeSpec, head_dim: int, positions: int) -> np.ndarray:
    """Row p: the cosine and the signed sine of position p's angles, float32 [positions, 2, head_dim].

    The angle is the float32 product of position and inverse frequency, as in the original model. The first half of
    the sines is negated, so that a rotation is x * cos + swap_halves(x) * sin.
    """
    frequencies = inverse_frequencies(rope, head_dim)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    cos, sin = np.ones_like(angles), np.zeros_like(angles)
    for place in zip(*np.nonzero(angles), strict=True):
        cos[place], sin[place] = _cos_sin(float(angles[place]))
    return np.stack([np.concatenate([cos, cos], 1), np.concatenate([-sin, sin], 1)], 1)


def _cos_sin(angle: float) -> tuple[float, float]:
    """Both Taylor series of exp(i angle), after the angle is brought below a full turn."""
    with localcontext() as context:
        context.prec = _DIGITS
        turned = Decimal(angle) % _TWO_PI
        sums, term, degree = [Decimal(1), Decimal(0)], Decimal(1), 0
        while abs(term) > _TINY or degree < turned:  # terms grow up to the angle's own degree
            degree += 1
            term *= turned / degree
            sums[degree % 2] += term if degree % 4 < 2 else -term
        return float(sums[0]), float(sums[1])
