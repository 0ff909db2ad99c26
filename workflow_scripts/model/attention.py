"""Self-attention of one layer: per-head QK-norm, scale-free V-norm, RoPE, no 1/sqrt(d), shared K/V.

Source: HF transformers, models/gemma4/modeling_gemma4.py (Gemma4TextAttention, eager_attention_forward).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.model.norm import as_dtype, rms_normalize
from workflow_scripts.model.rope import rotate


class KeyValue(NamedTuple):
    """Keys (after norm and RoPE) and values (after norm), each [1, kv_heads, T, head_dim]."""

    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """What `RotaryEmbedding` gives for the current positions."""

    cos: Tensor
    signed_sin: Tensor


class Attention(nn.Module):
    """Queries of one layer over given K/V; layers that own K/V also project them."""

    def __init__(
        self, config: TextConfig, layer: int, linear: LinearFactory, norm: LinearFactory, dtype: torch.dtype
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}.self_attn."
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps, self.dtype = config.layer_head_dim(layer), config.rms_norm_eps, dtype
        self.q_proj, self.q_norm = linear(prefix + "q_proj.weight"), norm(prefix + "q_norm.weight")
        self.o_proj = linear(prefix + "o_proj.weight")
        if not config.is_shared(layer):
            self.k_proj, self.k_norm = linear(prefix + "k_proj.weight"), norm(prefix + "k_norm.weight")
            self.v_proj = linear(prefix + "v_proj.weight")

    def key_value(self, x: Tensor, rotation: Rotation) -> KeyValue:
        """K/V of the current positions, x [1, S, hidden]; what the kv_cache holds is this, already rotated."""
        key = rotate(self.k_norm(self._split(self.k_proj(x), self.kv_heads)), *rotation)
        value = rms_normalize(self._split(self.v_proj(x), self.kv_heads), self.eps)
        return KeyValue(as_dtype(key, self.dtype), as_dtype(value, self.dtype))

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor, seen: KeyValue) -> Tensor:
        """Attend from x [1, S, hidden] over `seen` (T positions) with an additive mask [1, 1, S, T]."""
        length = x.shape[1]
        query = rotate(self.q_norm(self._split(self.q_proj(x), self.heads)), *rotation)
        # The query heads that share a K/V head are laid out as extra rows, so K/V are never expanded.
        group = self.heads // self.kv_heads
        query = as_dtype(query, self.dtype).reshape(1, self.kv_heads, group * length, self.head_dim)
        rows = mask if length == 1 else mask.repeat(1, 1, group, 1)
        mixed = nn.functional.scaled_dot_product_attention(query, *seen, attn_mask=rows, scale=1.0)
        mixed = mixed.reshape(1, self.heads, length, self.head_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(1, length, self.heads * self.head_dim))

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """[1, S, heads * head_dim] -> [1, heads, S, head_dim] (norms and RoPE act per head)."""
        return x.reshape(1, x.shape[1], heads, self.head_dim).transpose(1, 2)
