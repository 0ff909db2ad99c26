"""Graph form `hostcache_core`: one position per call, fixed shapes, the host keeps the kv_cache.

The graph reads all past columns, adds the current one behind them and returns the current column alone; the host
writes it into its cache. So the graph has no state, which the first system releases could not write in place.
"""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import Decoder


class HostCacheCore(nn.Module):
    """The decoder with stacked caches: slot i of a type is its i-th layer that owns K/V."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        inputs_embeds: Tensor,
        per_layer_inputs: Tensor,
        position_ids: Tensor,
        causal_mask_full: Tensor,
        causal_mask_sliding: Tensor,
        sliding_k: Tensor,
        sliding_v: Tensor,
        full_k: Tensor,
        full_v: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Inputs and outputs in the order of `signature.hostcache_core`, with its shapes."""
        config = self.decoder.config
        caches = {SLIDING: (sliding_k, sliding_v), FULL: (full_k, full_v)}
        past = {
            layer: KeyValue(key[slot], value[slot])
            for kind, (key, value) in caches.items()
            for slot, layer in enumerate(config.slots(kind))
        }
        masks = {FULL: causal_mask_full, SLIDING: causal_mask_sliding}
        hidden, current = self.decoder(inputs_embeds, per_layer_inputs, position_ids, masks, past)
        sliding = [current[layer] for layer in config.slots(SLIDING)]
        full = [current[layer] for layer in config.slots(FULL)]
        return (
            hidden,
            torch.stack([pair.key for pair in sliding]),
            torch.stack([pair.value for pair in sliding]),
            torch.stack([pair.key for pair in full]),
            torch.stack([pair.value for pair in full]),
        )
