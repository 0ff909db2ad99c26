"""Graph form `stateful_core`: the decoder over S positions, its K/V in four states whose columns are the positions."""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import Decoder, linear_masks
from workflow_scripts.model.kv_state import StateCaches, block_columns


class StatefulCore(nn.Module):
    """Function `main`; inputs, states and output in the order of its signature."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        inputs_embeds: Tensor,
        per_layer_inputs: Tensor,
        position_ids: Tensor,
        sliding_key_cache: Tensor,
        sliding_value_cache: Tensor,
        full_key_cache: Tensor,
        full_value_cache: Tensor,
    ) -> Tensor:
        """`position_ids` [1, T] counts from 0 to the last position of the block; the block is its last S."""
        config, dtype = self.decoder.config, self.decoder.dtype
        end = position_ids.shape[1]
        first = end - inputs_embeds.shape[1]
        queries = position_ids[:, first:]
        columns = torch.arange(full_key_cache.shape[3], dtype=torch.int32)
        masks = linear_masks(config, queries[0], columns, dtype)
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        state = StateCaches(config, caches, dict.fromkeys(caches, block_columns(first, end)))
        hidden = self.decoder.walk(inputs_embeds, per_layer_inputs, queries, masks, state)
        state.write()
        return hidden
