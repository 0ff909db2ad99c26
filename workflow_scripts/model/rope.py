"""Rotary position embedding: half-split pairs (i, i + head_dim/2), angles in float32.

Source: HF transformers, modeling_rope_utils.py (`default`, `proportional`).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import RopeSpec
from workflow_scripts.model.frequencies import inverse_frequencies


class RotaryEmbedding(nn.Module):
    """Cosine and signed sine of every position's angles, for one type of layer."""

    def __init__(self, rope: RopeSpec, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.from_numpy(inverse_frequencies(rope, head_dim)))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[1, S] int -> (cos, sin) each [1, 1, S, head_dim] float32, the first half of sin negated."""
        angles = position_ids.to(torch.float32)[:, None, :, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate [1, heads, S, head_dim] by the angles of `RotaryEmbedding`."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, first], -1) * signed_sin
