"""The text decoder's configuration: every field explicit, in one canonical form.

How the world's config.json files spell it is the matter of `config_json.py`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from workflow_scripts.errors import UserError

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one layer type.

    `rope_type` is `default` or `proportional`; `partial_rotary_factor` is the rotated share of the head (1.0 for
    `default`).
    """

    theta: float
    rope_type: str
    partial_rotary_factor: float


@dataclass(frozen=True)
class TextConfig:
    """The canonical configuration. `head_dim` is the sliding layers' head size, `global_head_dim` the full layers'."""

    vocab_size: int
    vocab_size_per_layer_input: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    global_head_dim: int
    hidden_size_per_layer_input: int
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    sliding_window: int
    final_logit_softcapping: float
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]
    rope: dict[str, RopeSpec]
    tie_word_embeddings: bool
    bos_token_id: int
    pad_token_id: int
    eos_token_ids: tuple[int, ...]

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer that owns no K/V (`num_hidden_layers` where none is shared)."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def is_shared(self, layer: int) -> bool:
        """True for a layer that reads the K/V of another one."""
        return layer >= self.first_shared_layer

    def producer(self, layer: int) -> int:
        """The layer whose K/V this layer reads: itself, or the last non-shared layer of the same type."""
        return self.slots(self.layer_types[layer])[-1] if self.is_shared(layer) else layer

    def layer_head_dim(self, layer: int) -> int:
        """Head size of a layer."""
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def layer_intermediate_size(self, layer: int) -> int:
        """MLP width of a layer: twice as wide on shared layers where the model says so."""
        wide = self.use_double_wide_mlp and self.is_shared(layer)
        return self.intermediate_size * (2 if wide else 1)

    def slots(self, layer_type: str) -> list[int]:
        """The layers of a type that own K/V, in order; a layer's position in it is its kv_cache slot."""
        return [layer for layer in range(self.first_shared_layer) if self.layer_types[layer] == layer_type]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        return {
            **asdict(self),
            "layer_types": list(self.layer_types),
            "eos_token_ids": list(self.eos_token_ids),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TextConfig":
        """Read what `to_json` wrote. Raises UserError where a field is missing or unknown."""
        names = {field.name for field in fields(cls)}
        if wrong := sorted(names ^ value.keys()):
            raise UserError(f"a stored text_config has missing or unknown fields: {', '.join(wrong)}")
        return cls(
            **{
                **value,
                "layer_types": tuple(value["layer_types"]),
                "eos_token_ids": tuple(value["eos_token_ids"]),
                "rope": {kind: RopeSpec(**spec) for kind, spec in value["rope"].items()},
            }
        )
