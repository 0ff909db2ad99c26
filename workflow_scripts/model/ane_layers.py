"""A layer of the decoder in the operators that the Neural Engine runs, for one position.

The same mathematics as `decoder.py`, in other operators: `coreai/ane_rules.py` says for each why. Everything is in one
dtype from input to output, since the engine has no wider one to store, and a cast to it is dropped there. A position is
a row [1, 1, 1, C] for norms and sums and a column [1, C, 1, 1] for convolutions; with one position both are the same
bytes, so that going from one to the other costs nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.model.ane_conv import ConvFactory
from workflow_scripts.model.rotary_table import rotary_table
from workflow_scripts.quantize.weights import Weights

LARGEST = 128.0
"""Norms scale larger values down to this: its square is 2^14, a quarter of what float16 holds."""
LAST_EXACT = 2048
"""Up to here float16 holds every integer, so that a position is equal to itself alone."""


class KeyValue(NamedTuple):
    """Keys (after norm and rotation) and values (after norm), each [1, kv_heads, T, head_dim]."""

    key: Tensor
    value: Tensor


class UnitRMS(nn.Module):
    """x / rms(x) over the last axis, as a LayerNorm over [x, -x]: its mean is zero, its variance the mean square.

    The engine computes a LayerNorm as one operator with wide sums, while mean(x^2) from single operators overflows
    float16 as soon as rms(x) exceeds 255. A row with larger values is scaled down first, which a norm takes out
    again: then the squares fit into float16 too, should a compiler split the operator. `eps` is added to a mean square
    of at least 2^14 / n there, so that the scale does not show in it. Rows below 128 are left as they are.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        # Without them the converter puts float32 constants into the graph.
        self.register_buffer("ones", torch.ones(2 * size, dtype=dtype))
        self.register_buffer("zeros", torch.zeros(2 * size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        both = torch.cat([x, -x], -1)
        largest = both.amax(-1, keepdim=True)  # of |x|, as both signs are there
        # Nothing in between is subnormal in float16, as the reciprocal of `largest` could be.
        both = both / (largest * (1 / LARGEST)).clamp_min(1)
        normed = nn.functional.layer_norm(both, (2 * self.size,), self.ones, self.zeros, self.eps)
        return normed[..., : self.size]


class AneRMSNorm(nn.Module):
    """UnitRMS times a weight [n], all in one dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.unit = UnitRMS(len(weight), eps, weight.dtype)
        self.register_buffer("weight", weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n]."""
        return self.unit(x) * self.weight


class RotaryLookup(nn.Module):
    """Cosine and signed sine of a position, for the layer types of a chunk.

    A one-hot column times the stored rows: exact, as one product is the row and the others are zero. The engine's own
    sine is off by up to 0.1, a float16 angle by 0.03, and a gather takes the graph off the engine.
    """

    def __init__(self, config: TextConfig, kinds: list[str], context: int, dtype: torch.dtype) -> None:
        super().__init__()
        if context > LAST_EXACT:
            raise UserError(
                f"context is {context} in the workflow's config: a chunk for the Neural Engine compares positions in "
                f"float16, which is exact up to {LAST_EXACT} only"
            )
        self.dtype = dtype
        self.register_buffer("positions", torch.arange(context).to(dtype).reshape(1, context, 1, 1))
        for kind in kinds:
            head_dim = config.layer_head_dim(config.layer_types.index(kind))
            rows = torch.from_numpy(rotary_table(config.rope[kind], head_dim, context))
            columns = rows.reshape(context, 2 * head_dim).T.contiguous()
            self.register_buffer(kind, columns.to(dtype).reshape(2 * head_dim, context, 1, 1))

    def forward(self, position_ids: Tensor, kind: str) -> Tensor:
        """[1, 1] int32 -> [1, 2, 1, head_dim]."""
        position = position_ids.to(self.dtype).reshape(1, 1, 1, 1)
        chosen = (position == self.positions).to(self.dtype)
        return nn.functional.conv2d(chosen, getattr(self, kind)).reshape(1, 2, 1, -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the half-split pairs of [1, heads, N, head_dim] by [1, 2, 1, head_dim] of a `RotaryLookup`."""
    first, second = x.chunk(2, -1)
    return x * rotation[:, :1] + torch.cat([second, first], -1) * rotation[:, 1:]


class AneAttention(nn.Module):
    """Queries of one layer over given K/V; layers that own K/V also project them."""

    def __init__(
        self, config: TextConfig, layer: int, conv: ConvFactory, weights: Weights, dtype: torch.dtype
    ) -> None:
        super().__init__()
        prefix, eps = f"layers.{layer}.self_attn.", config.rms_norm_eps
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.layer_head_dim(layer)
        self.q_proj, self.q_norm = (
            conv(prefix + "q_proj.weight"),
            _norm(weights, prefix + "q_norm", eps, dtype),
        )
        self.o_proj = conv(prefix + "o_proj.weight")
        if not config.is_shared(layer):
            self.k_proj, self.k_norm = (
                conv(prefix + "k_proj.weight"),
                _norm(weights, prefix + "k_norm", eps, dtype),
            )
            self.v_proj, self.v_norm = conv(prefix + "v_proj.weight"), UnitRMS(self.head_dim, eps, dtype)

    def key_value(self, x: Tensor, rotation: Tensor) -> KeyValue:
        """K/V of the position with the normed column x [1, hidden, 1, 1]."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), rotation)
        return KeyValue(key, self.v_norm(self._heads(self.v_proj(x))))

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor, seen: KeyValue) -> Tensor:
        """Attend from x [1, hidden, 1, 1] over `seen` (T columns) with an additive mask [1, 1, 1, T].

        The query heads of a K/V head are the rows of one product. Softmax step by step: the engine's fused attention
        ignores the mask.
        """
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), rotation)
        scores = query @ seen.key.transpose(-1, -2) + mask
        powers = torch.exp(scores - scores.amax(-1, keepdim=True))
        mixed = (powers / powers.sum(-1, keepdim=True)) @ seen.value
        return self.o_proj(mixed.reshape(1, -1, 1, 1))

    def _heads(self, x: Tensor) -> Tensor:
        """A column [1, kv_heads * N * head_dim, 1, 1] as [1, kv_heads, N, head_dim]."""
        return x.reshape(1, self.kv_heads, -1, self.head_dim)


class AneLayer(nn.Module):
    """Attention, MLP and per-layer embedding, each a branch with a norm before its sum (sandwich norm)."""

    def __init__(
        self, config: TextConfig, layer: int, conv: ConvFactory, weights: Weights, dtype: torch.dtype
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}."

        def norm(name: str) -> AneRMSNorm:
            return _norm(weights, prefix + name, config.rms_norm_eps, dtype)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = AneAttention(config, layer, conv, weights, dtype)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.gate_proj, self.up_proj = (conv(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
        self.down_proj = conv(prefix + "mlp.down_proj.weight")
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.per_layer_input_gate = conv(prefix + "per_layer_input_gate.weight")
        self.per_layer_projection = conv(prefix + "per_layer_projection.weight")
        self.post_per_layer_input_norm = norm("post_per_layer_input_norm")
        self.register_buffer("layer_scalar", _vector(weights, prefix + "layer_scalar", dtype))

    def attention_input(self, h: Tensor) -> Tensor:
        """The normed residual [1, 1, 1, hidden] as the column that q, k and v are projected from."""
        return _column(self.input_layernorm(h))

    def forward(
        self, h: Tensor, x: Tensor, per_layer_input: Tensor, rotation: Tensor, mask: Tensor, seen: KeyValue
    ) -> Tensor:
        """Residual h [1, 1, 1, hidden], x = attention_input(h), per_layer_input [1, ple_dim, 1, 1] -> new h."""
        h = h + self.post_attention_layernorm(_row(self.self_attn(x, rotation, mask, seen)))
        x = _column(self.pre_feedforward_layernorm(h))
        x = self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        h = h + self.post_feedforward_layernorm(_row(x))
        # The gate reads the residual itself, without a norm.
        gate = nn.functional.gelu(self.per_layer_input_gate(_column(h)), approximate="tanh")
        x = self.per_layer_projection(gate * per_layer_input)
        h = h + self.post_per_layer_input_norm(_row(x))
        return h * self.layer_scalar  # scales the whole residual stream, not the branch


def _norm(weights: Weights, name: str, eps: float, dtype: torch.dtype) -> AneRMSNorm:
    return AneRMSNorm(_vector(weights, f"{name}.weight", dtype), eps)


def _vector(weights: Weights, name: str, dtype: torch.dtype) -> Tensor:
    """Cast here and not in the graph, where the converter would fold it into a constant with a random name."""
    return torch.from_numpy(weights.vector(name)).to(dtype)


def _row(x: Tensor) -> Tensor:
    return x.reshape(1, 1, 1, -1)


def _column(x: Tensor) -> Tensor:
    return x.reshape(1, -1, 1, 1)
