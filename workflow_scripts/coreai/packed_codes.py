"""4-bit codes on their way into a bundle: packed on the disk, where the converter takes memory."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from workflow_scripts.coreai.private import Pack
from workflow_scripts.scratch import Scratch

_SMALL = 256  # codes
_CODES_AT_ONCE = 1 << 22  # an even number


class PackedOnDisk:
    """Packs for the converter, with the same bytes.

    The converter takes fresh memory for every tensor of every function, which all stays until the program is written:
    5.6 GB for E2B's ring (measured). Codes that were packed before, for another function, are not packed again.
    """

    def __init__(self, scratch: Scratch, stock: Pack) -> None:
        self._scratch, self._stock = scratch, stock
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, codes: Tensor, bits: int) -> Tensor:
        """Codes int8 or uint8 -> uint8, flat, two in a byte."""
        if bits != 4 or codes.numel() < _SMALL or not codes.is_contiguous():
            return self._stock(codes, bits)
        place = codes.data_ptr(), codes.numel()
        if place not in self._made:
            flat = codes.detach().reshape(-1).numpy()
            packed = self._scratch.array(_packed_blocks(flat), ((len(flat) + 1) // 2,), np.dtype(np.uint8))
            # The codes are kept beside what was made of them, so that no others come to lie in their place.
            self._made[place] = codes, torch.from_numpy(packed)
        return self._made[place][1]


def _packed_blocks(codes: np.ndarray) -> Iterator[np.ndarray]:
    """Two codes in a byte, the first in the low four bits."""
    for start in range(0, len(codes), _CODES_AT_ONCE):
        nibbles = codes[start : start + _CODES_AT_ONCE].view(np.uint8) & 15
        packed = nibbles[0::2].copy()
        packed[: len(nibbles) // 2] |= nibbles[1::2] << 4
        yield packed
