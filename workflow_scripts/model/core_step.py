"""Function `step` of the cores with states: one position with every shape static, for what compiles no other."""

from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import Decoder, additive
from workflow_scripts.model.kv_state import LongColumn, RingColumn, StateCaches


class CoreStep(nn.Module):
    """Inputs, states and output in the order of its signature; `column` says where the position's K/V go."""

    def __init__(self, decoder: Decoder, column: LongColumn | RingColumn) -> None:
        super().__init__()
        self.decoder, self.column = decoder, column

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
        """`position_ids` [1, 1] is the current position; its column is written before attention reads."""
        position = position_ids[0]
        masks = {
            kind: additive(seen, self.decoder.dtype) for kind, seen in self.column.seen(position).items()
        }
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        state = StateCaches(self.decoder.config, caches, self.column.columns(position))
        hidden = self.decoder.walk(inputs_embeds, per_layer_inputs, position_ids, masks, state)
        state.write()
        return hidden
