"""Graph form `ring_core`: as `stateful_core`, the sliding layers' K/V in rings of the window's size."""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import Decoder, additive
from workflow_scripts.model.kv_state import Ring, StateCaches, block_columns


class RingCore(nn.Module):
    """Function `main`; inputs, states and output in the order of its signature.

    `positions` is the largest number of positions.
    """

    def __init__(self, decoder: Decoder, positions: int) -> None:
        super().__init__()
        self.decoder, self.ring = decoder, Ring(decoder.config.sliding_window, positions)

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
        end = position_ids.shape[1]
        first = end - inputs_embeds.shape[1]
        queries = position_ids[:, first:]
        masks = {
            SLIDING: self._sliding_mask(queries[0]),
            FULL: self._full_mask(queries[0], full_key_cache.shape[3]),
        }
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        columns = {
            SLIDING: self.ring.block_columns(queries[0, :1], queries[0, -1:]),
            FULL: block_columns(first, end),
        }
        state = StateCaches(self.decoder.config, caches, columns)
        hidden = self.decoder.walk(inputs_embeds, per_layer_inputs, queries, masks, state)
        state.write()
        return hidden

    def _sliding_mask(self, queries: Tensor) -> Tensor:
        """Over the ring as it was before the block, and then the block."""
        columns = torch.cat([self.ring.held_before(queries[:1]), queries])
        distance = queries[:, None] - columns[None]
        visible = (columns >= 0)[None] & (distance >= 0) & (distance < self.ring.window)
        return additive(visible, self.decoder.dtype)

    def _full_mask(self, queries: Tensor, columns: int | torch.SymInt) -> Tensor:
        return additive(
            queries[:, None] >= torch.arange(columns, dtype=torch.int32)[None], self.decoder.dtype
        )
