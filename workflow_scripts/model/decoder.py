"""The Gemma 4 text decoder: 35 layers for E2B, read top to bottom.

One token at a time and whole sequences use the same code: the caller gives the K/V of past positions (or none), or
keeps all K/V itself, and additive masks over the columns that attention sees. The residual stream is float32 in every
precision: it has the largest values of the model, and it saves two casts per norm.
Source: HF transformers, models/gemma4/modeling_gemma4.py (Gemma4TextDecoderLayer, Gemma4TextModel).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING, TextConfig
from workflow_scripts.model.attention import Attention, KeyValue, Rotation
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.model.norm import RMSNorm, as_dtype
from workflow_scripts.model.rope import RotaryEmbedding
from workflow_scripts.quantize.weights import Weights

MASKED = -1e4
"""Additive mask of a hidden column: far below any score, and finite in float16 (finfo.min makes NaN rows)."""


class DecoderOutput(NamedTuple):
    """Final-normed hidden states [1, S, hidden] and the current K/V of each layer that owns some."""

    hidden: Tensor
    current: dict[int, KeyValue]


class MLP(nn.Module):
    """down(gelu_tanh(gate x) * up x)."""

    def __init__(self, layer: int, linear: LinearFactory) -> None:
        super().__init__()
        prefix = f"layers.{layer}.mlp."
        self.gate_proj, self.up_proj = linear(prefix + "gate_proj.weight"), linear(prefix + "up_proj.weight")
        self.down_proj = linear(prefix + "down_proj.weight")

    def forward(self, x: Tensor) -> Tensor:
        """[1, S, hidden] -> [1, S, hidden]."""
        return self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, MLP and per-layer embedding, each a branch with a norm before its sum (sandwich norm)."""

    def __init__(
        self, config: TextConfig, layer: int, linear: LinearFactory, weights: Weights, dtype: torch.dtype
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}."

        def norm(name: str) -> RMSNorm:
            return RMSNorm(torch.from_numpy(weights.vector(name)), config.rms_norm_eps)

        self.dtype = dtype
        self.input_layernorm = norm(prefix + "input_layernorm.weight")
        self.self_attn = Attention(config, layer, linear, norm, dtype)
        self.post_attention_layernorm = norm(prefix + "post_attention_layernorm.weight")
        self.pre_feedforward_layernorm = norm(prefix + "pre_feedforward_layernorm.weight")
        self.mlp = MLP(layer, linear)
        self.post_feedforward_layernorm = norm(prefix + "post_feedforward_layernorm.weight")
        self.per_layer_input_gate = linear(prefix + "per_layer_input_gate.weight")
        self.per_layer_projection = linear(prefix + "per_layer_projection.weight")
        self.post_per_layer_input_norm = norm(prefix + "post_per_layer_input_norm.weight")
        self.register_buffer("layer_scalar", torch.from_numpy(weights.vector(prefix + "layer_scalar")))

    def attention_input(self, h: Tensor) -> Tensor:
        """The normed residual [1, S, hidden] that q, k and v are projected from."""
        return as_dtype(self.input_layernorm(h), self.dtype)

    def forward(
        self, h: Tensor, x: Tensor, per_layer_input: Tensor, rotation: Rotation, mask: Tensor, seen: KeyValue
    ) -> Tensor:
        """Residual h [1, S, hidden] float32, x = attention_input(h), per_layer_input [1, S, ple_dim] -> new h."""
        h = h + self.post_attention_layernorm(self.self_attn(x, rotation, mask, seen))
        x = as_dtype(self.pre_feedforward_layernorm(h), self.dtype)
        h = h + self.post_feedforward_layernorm(self.mlp(x))
        # The gate reads the residual itself, without a norm.
        gate = nn.functional.gelu(self.per_layer_input_gate(as_dtype(h, self.dtype)), approximate="tanh")
        h = h + self.post_per_layer_input_norm(self.per_layer_projection(gate * per_layer_input))
        return h * self.layer_scalar  # scales the whole residual stream, not the branch


class Decoder(nn.Module):
    """All layers and the final norm."""

    def __init__(self, weights: Weights, linear: LinearFactory, dtype: torch.dtype) -> None:
        super().__init__()
        config = weights.config
        self.config, self.dtype = config, dtype
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, linear, weights, dtype) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(torch.from_numpy(weights.vector("norm.weight")), config.rms_norm_eps)
        self.rotary = nn.ModuleDict(
            {
                kind: RotaryEmbedding(
                    config.rope[kind], config.layer_head_dim(config.layer_types.index(kind))
                )
                for kind in sorted(set(config.layer_types))
            }
        )

    def forward(
        self,
        inputs_embeds: Tensor,
        per_layer_inputs: Tensor,
        position_ids: Tensor,
        masks: dict[str, Tensor],
        past: dict[int, KeyValue],
    ) -> DecoderOutput:
        """Run S positions.

        inputs_embeds [1, S, hidden] (scaled by sqrt(hidden)); per_layer_inputs [1, S, layers, ple_dim] (token and
        context part, already combined); position_ids [1, S]; masks: layer type -> additive [1, 1, S, past + S];
        past: layer index -> K/V of earlier positions, empty for a whole sequence.
        """
        current: dict[int, KeyValue] = {}

        def append(layer: int, new: KeyValue) -> KeyValue:
            current[layer] = new
            return _append(past.get(layer), new)

        hidden = self.walk(inputs_embeds, per_layer_inputs, position_ids, masks, append)
        return DecoderOutput(hidden, current)

    def walk(
        self,
        inputs_embeds: Tensor,
        per_layer_inputs: Tensor,
        position_ids: Tensor,
        masks: dict[str, Tensor],
        remember: Callable[[int, KeyValue], KeyValue],
    ) -> Tensor:
        """Final-normed hidden states [1, S, hidden] of S positions; inputs as for `forward`.

        `remember` takes the current K/V of a layer that owns some and returns all that is seen, T columns; masks:
        layer type -> additive [1, 1, S, T].
        """
        rotations = {kind: Rotation(*rotary(position_ids)) for kind, rotary in self.rotary.items()}
        h = as_dtype(inputs_embeds, torch.float32)
        seen: dict[int, KeyValue] = {}  # by the layer that produced it
        for index, layer in enumerate(self.layers):
            kind, producer = self.config.layer_types[index], self.config.producer(index)
            x = layer.attention_input(h)
            if producer == index:
                seen[index] = remember(index, layer.self_attn.key_value(x, rotations[kind]))
            ple = per_layer_inputs[:, :, index]
            h = layer(h, x, ple, rotations[kind], masks[kind], seen[producer])
        return as_dtype(self.norm(h), self.dtype)


def _append(past: KeyValue | None, new: KeyValue) -> KeyValue:
    if past is None:
        return new
    return KeyValue(torch.cat([past.key, new.key], 2), torch.cat([past.value, new.value], 2))


def causal_masks(config: TextConfig, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Additive masks [1, 1, S, S] of a whole sequence: full, and sliding (W keys including the own one)."""
    positions = torch.arange(length)
    return linear_masks(config, positions, positions, dtype)


def linear_masks(
    config: TextConfig, queries: Tensor, columns: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Additive masks [1, 1, S, T] of positions `queries` [S] over columns that hold the positions `columns` [T]."""
    distance = queries[:, None] - columns[None]
    return {
        FULL: additive(distance >= 0, dtype),
        SLIDING: additive((distance >= 0) & (distance < config.sliding_window), dtype),
    }


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool [S, T] -> additive mask [1, 1, S, T]."""
    return as_dtype(torch.where(visible, 0.0, MASKED), dtype)[None, None]
