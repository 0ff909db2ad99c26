"""A whole model of one token: embedding, per-layer inputs, decoder and head, made from weights and tables."""

import torch
from torch import Tensor, nn

from workflow_scripts.errors import UserError
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.frontend import GatherEmbeds, PerLayerMix, RowTable, gather_rows
from workflow_scripts.model.heads import LogitsHead
from workflow_scripts.model.kv_state import StateCaches, UnifiedCaches
from workflow_scripts.model.linear import DenseLinear, LinearFactory
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.norm import RMSNorm, as_dtype
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.raw import RawTables


class TokenDecoder(nn.Module):
    """Embedding, decoder and head of one token; the caches are the caller's matter.

    The embedding is int8 rows with one scale per row, the very ones of the front end: an int4 gather has no lowering,
    so the head's own codes cannot serve, and float16 rows (published) are twice as large.
    """

    def __init__(
        self, embeds: GatherEmbeds, mix: PerLayerMix, decoder: Decoder, head: LogitsHead, token_scale: float
    ) -> None:
        super().__init__()
        self.embeds, self.mix, self.decoder, self.head = embeds, mix, decoder, head
        self.token_scale = token_scale

    def token_part(self, input_ids: Tensor, ple_table: Tensor, ple_scale: Tensor) -> Tensor:
        """The token's own part of the per-layer inputs, from the whole table, as `decode` takes it."""
        rows = gather_rows(ple_table, ple_scale, input_ids) * self.token_scale
        return as_dtype(rows, self.decoder.dtype).reshape(1, 1, self.mix.layers, -1)

    def forward(
        self,
        input_ids: Tensor,
        position: Tensor,
        ple_tokens: Tensor,
        masks: dict[str, Tensor],
        caches: StateCaches | UnifiedCaches,
    ) -> Tensor:
        """Logits [1, 1, vocab]; position [1, 1], ple_tokens [1, 1, layers, ple_dim] scaled by sqrt(ple_dim)."""
        dtype = self.decoder.dtype
        embeds = self.embeds(input_ids)
        per_layer = as_dtype(self.mix(embeds, ple_tokens), dtype)
        hidden = self.decoder.walk(embeds, per_layer, position, masks, caches)
        return as_dtype(self.head(hidden), dtype)


def token_decoder(
    weights: Weights, tables: RawTables, linear: LinearFactory, dtype: torch.dtype
) -> TokenDecoder:
    """The model of one token, its head untied from the embedding: `linear` makes it, as it makes every layer.

    The context projection is in the compute type `dtype`: a bfloat16 checkpoint's numbers keep all their digits in
    float16. Raises UserError where weights and tables are of models of other sizes.
    """
    config, meta = weights.config, tables.meta
    sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers)
    if sizes != (meta.vocab_size, meta.hidden_size, meta.layers):
        raise UserError(
            f"the weights are of a model with vocabulary, hidden size and layers {sizes}, the tables of one with "
            f"{(meta.vocab_size, meta.hidden_size, meta.layers)}: build both from one checkpoint"
        )
    embeds = GatherEmbeds(
        RowTable(torch.from_numpy(tables.embed_rows), torch.from_numpy(tables.embed_scale)),
        meta.embed_scale_main,
        torch.float32,
    )
    mix = PerLayerMix(
        DenseLinear(torch.from_numpy(tables.projection).to(dtype)),
        RMSNorm(torch.from_numpy(tables.projection_norm), meta.rms_eps),
        layers=meta.layers,
        projection_scale=meta.proj_scale,
        input_scale=meta.input_scale,
        dtype=dtype,
    )
    head = LogitsHead(linear(HEAD_WEIGHT), config.final_logit_softcapping, dtype)
    return TokenDecoder(embeds, mix, Decoder(weights, linear, dtype), head, meta.embed_scale_pl)
