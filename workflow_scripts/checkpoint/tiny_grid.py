"""The grid that quantization-aware training puts a matrix on, for the tiny checkpoint that has one.

As published: in each block of 32 along a row, levels -8..7 times one step, kept in bfloat16, and in many blocks the
peak lies at a level below 8. So a packer that takes the peak for the last level leaves the grid.
"""

import torch

BLOCK = 32
# Level of a block's peak, 8 downwards, by upper bounds of cumulative shares: 8 in half of the blocks, 1 in 1%.
_BOUNDS = (0.50, 0.74, 0.86, 0.92, 0.96, 0.98, 0.99)
_GOLDEN = (5**0.5 - 1) / 2  # its multiples modulo 1 spread evenly, in rows of any number of blocks


def on_grid(weight: torch.Tensor) -> torch.Tensor:
    """The nearest point on the grid to a matrix [rows, inputs], every number a bfloat16 one; same shape and dtype.

    Which level a block's peak has depends on the block's place alone, so that training moves within one grid.
    """
    blocks = weight.unflatten(1, (-1, BLOCK))
    highest, lowest = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    levels = _peak_levels(highest.numel()).view_as(highest)
    levels = torch.where((levels == 8) & (highest >= -lowest), 7, levels)  # level 8 is a negative one only
    steps = torch.maximum(highest, -lowest).clamp_min(1e-12) / levels
    return ((blocks / steps).round().clamp(-8, 7) * steps).flatten(1).bfloat16().to(weight.dtype)


def _peak_levels(blocks: int) -> torch.Tensor:
    """The peak's level of each block, 1 to 8."""
    place = torch.arange(blocks, dtype=torch.float64) * _GOLDEN % 1
    return 8 - torch.bucketize(place, torch.tensor(_BOUNDS, dtype=torch.float64), right=True)
