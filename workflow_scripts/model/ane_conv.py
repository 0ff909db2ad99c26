"""Bias-free linear layers as 1x1 convolutions: the form in which the Neural Engine multiplies by stored weights.

Its convolution unit sums in float32, whereas a matmul by stored weights was seen to sum in float16 there (see
`coreai/ane_rules.py`). One position is a column [1, K, 1, 1].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.weights import Dense, Matrix, Palette, Weights, expanded_blocks

ConvFactory = Callable[[str], nn.Module]
"""Maps a canonical tensor name such as `layers.3.mlp.up_proj.weight` to its layer."""


class DenseConv(nn.Module):
    """y = W x with W [N, K] stored as plain numbers [N, K, 1, 1]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.reshape(*weight.shape, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[1, K, 1, 1] -> [1, N, 1, 1]."""
        return nn.functional.conv2d(x, self.weight)


class ExpandedConv(nn.Module):
    """y = W x with W [N, K] as it is stored: expanded to float32 in every call, some rows at a time (for torch)."""

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        self.stored = stored

    def forward(self, x: Tensor) -> Tensor:
        """[1, K, 1, 1] float32 -> [1, N, 1, 1]."""
        blocks = (torch.from_numpy(block)[:, :, None, None] for block in expanded_blocks(self.stored))
        return torch.cat([nn.functional.conv2d(x, block) for block in blocks], dim=1)


class PaletteConv(nn.Module):
    """y = W x with W [N, K] stored as one palette index per value and a codebook per group of rows.

    The converter recognises the packed form by the buffers' names (measured on coreai-torch 0.4.3). Eager execution
    expands N * K * 2^bits values: use `ExpandedConv` there.
    """

    def __init__(self, palette: Palette, dtype: torch.dtype) -> None:
        super().__init__()
        # The ops are registered by this import alone, not by `import coreai_torch`.
        import coreai_torch._compression.custom_layers  # noqa: F401

        groups, entries = palette.codebook.shape
        codebook = torch.from_numpy(palette.codebook).to(dtype)
        self.register_buffer(
            "indices", torch.from_numpy(palette.indices).reshape(*palette.indices.shape, 1, 1)
        )
        self.register_buffer("lut", codebook.reshape(groups, 1, 1, 1, entries, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[1, K, 1, 1] -> [1, N, 1, 1]."""
        return nn.functional.conv2d(x, torch.ops.coreai.lut_to_dense(self.indices, self.lut, 0))


def stored_conv(stored: Dense | Palette, dtype: torch.dtype) -> nn.Module:
    """The layer that carries a stored matrix into a bundle; `dtype` is the compute type of the graph.

    Raises UserError for linear codes.
    """
    if isinstance(stored, Dense):
        return DenseConv(torch.from_numpy(stored.array).to(dtype))
    if isinstance(stored, Palette):
        return PaletteConv(stored, dtype)
    raise UserError(
        "a bundle for the Neural Engine is to be made of linear codes, which do not compile for it: "
        "choose a recipe with palettes in the workflow's config"
    )


def exported_convs(weights: Weights, dtype: torch.dtype) -> ConvFactory:
    """Layers that carry the artifact's stored codes into a bundle."""

    def build(name: str) -> nn.Module:
        return stored_conv(weights.linear(name), dtype)

    return build


def eager_convs(weights: Weights) -> ConvFactory:
    """Layers with the artifact's values in float32, for torch."""
    return lambda name: ExpandedConv(weights.linear(name))
