"""Graph form `decode_ring`: as `decode_tbl` with every shape static, so that a device compiles it once.

The sliding caches are rings: position p is in column p % W. The full caches have a fixed capacity; several capacities
are several functions of one bundle, over the same weights. The own column is written before attention reads.
"""

from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import additive
from workflow_scripts.model.kv_state import RingColumn, StateCaches
from workflow_scripts.model.token_decoder import TokenDecoder


class DecodeRing(nn.Module):
    """One capacity; inputs, states and output in the order of its signature. `ple_scale` is as for `DecodeTable`."""

    def __init__(self, model: TokenDecoder, capacity: int) -> None:
        super().__init__()
        self.model, self.column = model, RingColumn(model.decoder.config.sliding_window, capacity)

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
        masks = {kind: additive(seen, dtype) for kind, seen in self.column.seen(position).items()}
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        state = StateCaches(config, caches, self.column.columns(position))
        tokens = self.model.token_part(input_ids, ple_table, ple_scale)
        logits = self.model(input_ids, position_ids, tokens, masks, state)
        state.write()
        return logits
