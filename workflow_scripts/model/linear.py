"""Bias-free linear layers over a weights artifact: in float32 for eager torch, as stored codes for export."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workflow_scripts.quantize.weights import (
    Dense,
    Linear,
    Matrix,
    Palette,
    Weights,
    expanded_blocks,
)
from workflow_scripts.scratch import Scratch

LinearFactory = Callable[[str], nn.Module]
"""Maps a canonical tensor name such as `layers.3.mlp.up_proj.weight` to its layer."""


class DenseLinear(nn.Module):
    """y = x W^T with W [N, K] stored as plain numbers."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return nn.functional.linear(x, self.weight)


class ExpandedLinear(nn.Module):
    """y = x W^T with W [N, K] as it is stored: expanded to float32 in every call, some rows at a time.

    For eager torch on a model that is larger than the memory; each call takes what expanding takes.
    """

    def __init__(self, stored: Matrix) -> None:
        super().__init__()
        self.stored = stored

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] float32 -> [..., N]."""
        blocks = map(torch.from_numpy, expanded_blocks(self.stored))
        return torch.cat([nn.functional.linear(x, block) for block in blocks], dim=-1)


class PaletteLinear(nn.Module):
    """y = x W^T with W [N, K] stored as one palette index per value and a codebook per group of rows.

    The converter recognises the packed form by these buffer names: with others, widths below 8 bits fail
    to convert (measured on coreai-torch 0.4.3). Eager execution expands N*K*2^bits values: use `ExpandedLinear` there.
    """

    def __init__(self, palette: Palette, dtype: torch.dtype) -> None:
        super().__init__()
        # The ops are registered by this import alone, not by `import coreai_torch`.
        import coreai_torch._compression.custom_layers  # noqa: F401

        groups, entries = palette.codebook.shape
        codebook = torch.from_numpy(palette.codebook).to(dtype)
        self.register_buffer("indices", torch.from_numpy(palette.indices))
        self.register_buffer("lut", codebook.reshape(groups, 1, entries, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return nn.functional.linear(x, torch.ops.coreai.lut_to_dense(self.indices, self.lut, 0))


class BlockLinear(nn.Module):
    """y = x W^T with W [N, K] stored as signed codes and a step per block of a row.

    The width of the stored codes is always told: where it is not, the converter takes the fewest bits that hold the
    codes at hand (measured on coreai-torch 0.4.3: 2 bits for codes in -2..1).
    """

    def __init__(self, linear: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        # The ops are registered by this import alone, not by `import coreai_torch`.
        import coreai_torch._compression.custom_layers  # noqa: F401

        self.code_dtype = {4: torch.int4, 8: torch.int8}[linear.bits]
        self.register_buffer("codes", torch.from_numpy(linear.codes))
        self.register_buffer("steps", torch.from_numpy(linear.steps).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        weight = torch.ops.coreai.constexpr_blockwise_shift_scale(
            self.codes, self.steps, None, None, self.code_dtype, None
        )
        return nn.functional.linear(x, weight)


def eager_linears(weights: Weights) -> LinearFactory:
    """Layers with the artifact's values in float32: what every precision is compared with."""
    return lambda name: ExpandedLinear(weights.linear(name))


def exported_linears(weights: Weights, dtype: torch.dtype, scratch: Scratch) -> LinearFactory:
    """Layers that carry the artifact's stored codes into a bundle; `dtype` is the compute type of the graph.

    Codebooks, steps and dense values keep the artifact's float16 rounding also in a float32 graph, so that a
    float32 twin holds exactly the numbers of the shipped bundle. Dense values of another type are cast into `scratch`.
    """

    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype

    def build(name: str) -> nn.Module:
        stored = weights.linear(name)
        if isinstance(stored, Dense):
            return DenseLinear(torch.from_numpy(scratch.cast(stored.array, numpy_dtype)))
        if isinstance(stored, Linear):
            return BlockLinear(stored, dtype)
        return PaletteLinear(stored, dtype)

    return build
