"""Rotary position embedding: half-split pairs (i, i + head_dim/2), angles in float32.

Source: HF transformers, modeling_rope_utils.py (`default`, `proportional`).
"""

from decimal import Decimal

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim/2] float32.

    `proportional` rotates only the first `partial_rotary_factor` of the pairs; its exponents are still divided
    by the whole head_dim, and the other pairs get frequency 0, the identity.
    """
    rotated = int(rope.partial_rotary_factor * head_dim) // 2
    # In decimal arithmetic: these numbers are stored in bundles, and the last bit of torch's pow depends on the
    # processor's vector units (measured at head_dim 256 and 512).
    theta, size = Decimal(rope.theta), Decimal(head_dim)
    frequencies = [float(theta ** (-Decimal(2 * pair) / size)) for pair in range(rotated)]
    return torch.tensor(frequencies + [0.0] * (head_dim // 2 - rotated), dtype=torch.float32)


class RotaryEmbedding(nn.Module):
    """Cosine and signed sine of every position's angles, for one type of layer."""

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[1, S] int -> (cos, sin) each [1, 1, S, head_dim] float32, the first half of sin negated."""
        angles = position_ids.to(torch.float32)[:, None, :, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate [1, heads, S, head_dim] by the angles of `RotaryEmbedding`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, first], -1) * signed_sin
