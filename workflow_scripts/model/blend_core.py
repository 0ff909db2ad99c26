"""Graph form `blend_core`: one position, all static; a one-hot mask blends its K/V into the states.

A way around systems that cannot write a state by index: cache = cache * (1 - mask) + column * mask.
"""

from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.kv_state import StateCaches, blended_column


class BlendCore(nn.Module):
    """Inputs, states and output in the order of its signature."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        inputs_embeds: Tensor,
        per_layer_inputs: Tensor,
        position_ids: Tensor,
        write_mask: Tensor,
        causal_mask_full: Tensor,
        causal_mask_sliding: Tensor,
        sliding_key_cache: Tensor,
        sliding_value_cache: Tensor,
        full_key_cache: Tensor,
        full_value_cache: Tensor,
    ) -> Tensor:
        """All masks [1, 1, 1, context]; the own column is written before attention reads."""
        caches = {
            SLIDING: KeyValue(sliding_key_cache, sliding_value_cache),
            FULL: KeyValue(full_key_cache, full_value_cache),
        }
        columns = dict.fromkeys(caches, blended_column(write_mask))
        state = StateCaches(self.decoder.config, caches, columns)
        masks = {FULL: causal_mask_full, SLIDING: causal_mask_sliding}
        hidden = self.decoder.walk(inputs_embeds, per_layer_inputs, position_ids, masks, state)
        state.write()
        return hidden
