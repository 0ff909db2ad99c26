"""Graph form `decode_ring`: as `decode_tbl` with every shape static, so that a device compiles it once.

The sliding caches are rings: position p is in column p % W. The full caches have a fixed capacity; several capacities
are several functions of one bundle, over the same weights. The own column is written before attention reads.
"""

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import additive
from workflow_scripts.model.kv_state import Ring, StateCaches, chosen_column
from workflow_scripts.model.token_decoder import TokenDecoder


class DecodeRing(nn.Module):
    """One capacity; inputs, states and output in the order of its signature."""

    def __init__(self, model: TokenDecoder, capacity: int) -> None:
        super().__init__()
        self.model, self.ring = model, Ring(model.decoder.config.sliding_window, capacity)
        # Of the full caches' columns; a buffer, as in `Ring`.
        self.register_buffer("numbers", torch.arange(capacity, dtype=torch.int32))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        ple_table: Tensor,
        ple_scale: Tensor,
        sliding_key_cache: Tensor,
        sliding_value_cache: Tensor,
        full_key_cache: Tensor,
        full_value_cache: Tensor,
    ) -> Tensor:
        """`position_ids` [1, 1] is the current position."""
        config, dtype, position = self.model.decoder.config, self.model.decoder.dtype, position_ids[0]
        # Column r of a ring holds a position of the window as soon as position r has come: no remainder needed.
        masks = {
            SLIDING: additive((self.ring.numbers <= position)[None], dtype),
            FULL: additive((self.numbers <= position)[None], dtype),
        }
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        columns = {
            SLIDING: chosen_column(self.ring.column_of(position), self.ring.numbers),
            FULL: chosen_column(position, self.numbers),
        }
        state = StateCaches(config, caches, columns)
        tokens = self.model.token_part(input_ids, ple_table, ple_scale)
        logits = self.model(input_ids, position_ids, tokens, masks, state)
        state.write()
        return logits
