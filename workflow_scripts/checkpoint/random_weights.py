"""Normal bfloat16 numbers that depend on a key and an index alone: any part of any tensor can be made by itself.

The bytes are the same on every host, with any number of threads and any width of vector units, by construction:

- A number's 64 bits are SplitMix64 (Steele, Lea and Flood, 2014) of `key + (index + 1) * gamma`: integers only, and
  no state that goes from one number to the next.
- Its four 16-bit parts are added, an integer of at most 18 bits that is nearly normal (Irwin-Hall; it ends at 3.46
  standard deviations). The mean is added as an integer, too: below 2**24 the sum is exact in float32.
- One float32 multiplication, which IEEE 754 defines to the last bit, and nothing to fuse it with.
- The rounding to bfloat16, half to even, is integer arithmetic on the float's bits.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numba import njit

_CENTRE = 2 * 65535  # mean of the sum of four uniform 16-bit numbers
_SPREAD = math.sqrt(4 * (65536**2 - 1) / 12)  # its standard deviation
_EXACT = 2**24 - 2 * _CENTRE  # up to here a float32 holds any shifted sum


@dataclass(frozen=True)
class Normal:
    """A distribution: mean and standard deviation, of which the mean may be at most 400 times the latter."""

    mean: float
    deviation: float


def tensor_key(seed: int, name: str) -> int:
    """The 64-bit key of a tensor: the numbers of two tensors, or of two seeds, have nothing in common."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")


def fill_normal(out: np.ndarray, key: int, first: int, normal: Normal) -> None:
    """Fill `out`, bfloat16 [n], with the numbers `first` to `first + n` of the flattened tensor of a key.

    Raises ValueError where the mean is too large to be exact.
    """
    shift = round(normal.mean / normal.deviation * _SPREAD)
    if abs(shift) > _EXACT:
        raise ValueError(f"a mean of {normal.mean} beside a deviation of {normal.deviation} is not exact")
    scale = np.float32(normal.deviation / _SPREAD)
    _fill(out.view(np.uint16), np.uint64(key), np.uint64(first), np.int64(shift - _CENTRE), scale)


@njit(cache=True)
def _fill(codes: np.ndarray, key: np.uint64, first: np.uint64, shift: np.int64, scale: np.float32) -> None:
    """Fill `codes` uint16 with the bits of bfloat16 numbers."""
    gamma, low = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFFFF)
    for place in range(codes.size):
        bits = key + (first + np.uint64(place) + np.uint64(1)) * gamma
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
        total = (bits & low) + ((bits >> np.uint64(16)) & low) + ((bits >> np.uint64(32)) & low)
        total += bits >> np.uint64(48)
        number = np.float32(np.int32(np.int64(total) + shift)) * scale
        code = np.float32(number).view(np.uint32)
        codes[place] = (code + np.uint32(0x7FFF) + ((code >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
