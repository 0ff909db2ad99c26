"""What the kernels compute, in plain torch on the packed words: the definition that Metal source is tested against."""

import torch
from torch import Tensor, nn

from workflow_scripts.kernels.packing import GROUP_ROWS, WORD_BITS
from workflow_scripts.kernels.partials import TILE_ROWS


def expand(words: Tensor, codebook: Tensor, bits: int) -> Tensor:
    """Words int32 [N, K * bits / 32] and codebook [N / 32, 2**bits] -> weights float32 [N, K]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    # The shift carries the sign along; the mask removes it.
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    entries = codebook.to(torch.float32).repeat_interleave(GROUP_ROWS, dim=0)
    return entries.gather(1, codes.reshape(len(words), -1).to(torch.int64))


def palette_matvec(x: Tensor, words: Tensor, codebook: Tensor, bits: int) -> Tensor:
    """x [1, 1, K] -> W x [1, 1, N] in x's type; products and sums are float32, rounded once at the end."""
    return nn.functional.linear(x.to(torch.float32), expand(words, codebook, bits)).to(x.dtype)


def partial_argmax(hidden: Tensor, words: Tensor, codebook: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """hidden [1, 1, K] -> per tile of 8 rows its largest score, float32 [N / 8], and that row, int32 [N / 8].

    Among equal scores the lowest row wins.
    """
    scores = palette_matvec(hidden.to(torch.float32), words, codebook, bits)
    return largest_of_tiles(scores, torch.arange(0, len(words), TILE_ROWS, dtype=torch.int32))


def largest_of_tiles(scores: Tensor, first_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [..., N] and the first row of every tile, int32 [N / 8] -> largest scores and their lowest rows."""
    tiles = scores.reshape(-1, TILE_ROWS)
    largest = tiles.amax(dim=1)
    # argmax does not promise the first of equal maxima; the smallest place that holds the maximum is it.
    places = torch.arange(TILE_ROWS, dtype=torch.int32)
    nowhere = torch.tensor(TILE_ROWS, dtype=torch.int32)
    place = torch.where(tiles == largest[:, None], places, nowhere).amin(dim=1)
    return largest, first_rows + place
