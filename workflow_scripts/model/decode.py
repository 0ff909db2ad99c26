"""Graph forms `decode` and `decode_tbl`: token id -> logits in one graph, its kv_cache two dynamic states.

The per-layer table, too large for a device's memory, comes as the current token's row (`decode`), or as an input that
the host maps once (`decode_tbl`).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import linear_masks
from workflow_scripts.model.kv_state import UnifiedCaches
from workflow_scripts.model.token_decoder import TokenDecoder


class Decode(nn.Module):
    """Form `decode`; inputs, states and output in the order of its signature."""

    def __init__(self, model: TokenDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        ple_tokens: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """Writes column `position_ids.shape[1] - 1` of the caches."""
        config, dtype = self.model.decoder.config, self.model.decoder.dtype
        count, position = position_ids.shape[1], position_ids[:, -1:]
        columns = torch.arange(key_cache.shape[3], dtype=torch.int32)
        masks = linear_masks(config, position[0], columns, dtype)
        caches = UnifiedCaches(config, KeyValue(key_cache, value_cache), count)
        return self.model(input_ids, position, ple_tokens, masks, caches)


class DecodeTable(nn.Module):
    """Form `decode_tbl`; inputs, states and output in the order of its signature.

    `ple_scale` is the input of the tables' layout that the model was made with: scales per row or steps per block.
    """

    def __init__(self, model: TokenDecoder) -> None:
        super().__init__()
        self.decode = Decode(model)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        ple_table: Tensor,
        ple_scale: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
    ) -> Tensor:
        """As `Decode`, after the look-up."""
        tokens = self.decode.model.token_part(input_ids, ple_table, ple_scale)
        return self.decode(input_ids, position_ids, tokens, key_cache, value_cache)
