"""The kernels' results from ordinary graph operators, which the Core AI runtime can execute on any host.

A twin bundle holds these in place of the kernels, with the same codes; all else in its graph is the same. Sums are
float32 as in the kernels, so a twin shows the kernels' own rounding also in float16 graphs.
"""

import torch
from torch import Tensor, nn

from workflow_scripts.kernels.matrices import kernel_matrix
from workflow_scripts.kernels.reference import TILE_ROWS, largest_of_tiles
from workflow_scripts.model.linear import LinearFactory, PaletteLinear
from workflow_scripts.model.norm import as_dtype, as_float32
from workflow_scripts.quantize.weights import Palette, Weights

_WIDTHS = (4, 8)


class MatvecTwin(nn.Module):
    """Twin of the palette_matvec kernels."""

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.linear = PaletteLinear(palette, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[1, 1, K] -> [1, 1, N] in x's type."""
        return as_dtype(self.linear(as_float32(x)), x.dtype)


class PartialArgmaxTwin(nn.Module):
    """Twin of the head_argmax kernels."""

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.linear = PaletteLinear(palette, torch.float32)
        rows = len(palette.indices)
        self.register_buffer("first_rows", torch.arange(0, rows, TILE_ROWS, dtype=torch.int32))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, 1, K] -> partial values float32 [N / 8] and their rows int32 [N / 8]."""
        return largest_of_tiles(self.linear(as_float32(hidden)), self.first_rows)


def linears(weights: Weights) -> LinearFactory:
    """Twin layers over an artifact's palettes of either width."""
    return lambda name: MatvecTwin(kernel_matrix(weights, name, _WIDTHS))


def head(weights: Weights, name: str) -> PartialArgmaxTwin:
    """Twin head over the artifact's palette of either width."""
    return PartialArgmaxTwin(kernel_matrix(weights, name, _WIDTHS))
