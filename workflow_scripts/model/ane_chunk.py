"""Graph form `ane_chunk`: some layers of the decoder for the Neural Engine, one position per call, no state.

The whole decoder in one graph is more than a phone's compiler for the engine can take; the host runs chunk after
chunk, passes the hidden state on, and keeps the kv_cache (see `chunks.py` for what goes where).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.ane_conv import ConvFactory
from workflow_scripts.model.ane_layers import AneLayer, AneRMSNorm, KeyValue, RotaryLookup
from workflow_scripts.model.signature import CACHE_NAMES, ane_chunk, owned_slots
from workflow_scripts.quantize.weights import Weights


class AneChunk(nn.Module):
    """Layers [first, last); the last chunk of a model ends with the final norm."""

    def __init__(
        self,
        weights: Weights,
        conv: ConvFactory,
        dtype: torch.dtype,
        layers: tuple[int, int],
        context: int,
    ) -> None:
        super().__init__()
        first, last = layers
        config = self.config = weights.config
        self.first, self.inputs = (
            first,
            list(ane_chunk(config, context, "fp32", layers=layers)["main"].inputs),
        )
        self.layers = nn.ModuleList(AneLayer(config, i, conv, weights, dtype) for i in range(first, last))
        self.kinds = sorted(set(config.layer_types[first:last]))
        self.rotary = RotaryLookup(config, self.kinds, context, dtype)
        self.owned = {
            kind: [config.slots(kind)[slot] for slot in owned_slots(config, kind, layers)]
            for kind in CACHE_NAMES
        }
        ends = last == config.num_hidden_layers
        self.norm = _final_norm(weights, dtype) if ends else nn.Identity()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Inputs and outputs in the order of `signature.ane_chunk`, with its shapes."""
        given = dict(zip(self.inputs, tensors, strict=True))
        rotations = {kind: self.rotary(given["position_ids"], kind) for kind in self.kinds}
        h = given["hidden_in"].reshape(1, 1, 1, -1)
        current: dict[int, KeyValue] = {}
        seen = self._borrowed(given)  # past and current, by the layer that produced it
        for index, layer in enumerate(self.layers, self.first):
            kind, producer = self.config.layer_types[index], self.config.producer(index)
            x = layer.attention_input(h)
            if producer == index:
                current[index] = layer.self_attn.key_value(x, rotations[kind])
                seen[index] = self._joined(given, kind, index, current[index])
            ple = given["per_layer_inputs"][:, :, index - self.first].reshape(1, -1, 1, 1)
            h = layer(h, x, ple, rotations[kind], given[f"causal_mask_{CACHE_NAMES[kind]}"], seen[producer])
        return self.norm(h).reshape(1, 1, -1), *self._columns(current)

    def _borrowed(self, given: dict[str, Tensor]) -> dict[int, KeyValue]:
        """K/V of producers in earlier chunks, joined by the host: the engine's compiler joins two inputs wrongly."""
        return {
            self.config.slots(kind)[-1]: KeyValue(given[f"prod_{name}_kv_k"], given[f"prod_{name}_kv_v"])
            for kind, name in CACHE_NAMES.items()
            if f"prod_{name}_kv_k" in given
        }

    def _joined(self, given: dict[str, Tensor], kind: str, layer: int, new: KeyValue) -> KeyValue:
        """The past columns of an own slot, and behind them the current one."""
        name, slot = CACHE_NAMES[kind], self.owned[kind].index(layer)
        past = (given[f"{name}_k"][slot], given[f"{name}_v"][slot])
        return KeyValue(*(torch.cat([old, column], 2) for old, column in zip(past, new, strict=True)))

    def _columns(self, current: dict[int, KeyValue]) -> list[Tensor]:
        """The current K/V, stacked by slot: sliding keys and values, full keys and values, as far as there are any."""
        return [
            torch.stack([current[layer][part] for layer in self.owned[kind]])
            for kind in (SLIDING, FULL)
            if self.owned[kind]
            for part in range(2)
        ]


def _final_norm(weights: Weights, dtype: torch.dtype) -> AneRMSNorm:
    return AneRMSNorm(torch.from_numpy(weights.vector("norm.weight")).to(dtype), weights.config.rms_norm_eps)
