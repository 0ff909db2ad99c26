"""A whole model of one token: embedding, per-layer inputs, decoder and head, made from weights and tables."""

import torch
from torch import Tensor, nn

from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.frontend import GatherEmbeds, Int4Table, PerLayerMix, RowTable, Table
from workflow_scripts.model.heads import LogitsHead
from workflow_scripts.model.kv_state import StateCaches, UnifiedCaches
from workflow_scripts.model.linear import DenseLinear, LinearFactory
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.norm import RMSNorm, as_dtype
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.dump import Tables
from workflow_scripts.tables.int4 import Int4Tables
from workflow_scripts.tables.raw import RawTables


class TokenDecoder(nn.Module):
    """Embedding, decoder and head of one token; the caches are the caller's matter.

    The embedding is that of the raw tables, in their layout: an int4 gather has no lowering, so the head's own codes
    cannot serve, and float16 rows (published) are twice as large as int8 ones. A whole per-layer table that comes as
    input is in the same layout.
    """

    def __init__(
        self, embeds: GatherEmbeds, mix: PerLayerMix, decoder: Decoder, head: LogitsHead, token_scale: float
    ) -> None:
        super().__init__()
        self.embeds, self.mix, self.decoder, self.head = embeds, mix, decoder, head
        self.token_scale = token_scale

    def token_part(self, input_ids: Tensor, ple_table: Tensor, ple_scale: Tensor) -> Tensor:
        """The token's own part of the per-layer inputs, from the whole table, as `decode` takes it.

        `ple_scale` is the table's scales per row, or steps per block.
        """
        rows = self.embeds.table.gather(input_ids, ple_table, ple_scale) * self.token_scale
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
    weights: Weights, tables: Tables, linear: LinearFactory, dtype: torch.dtype
) -> TokenDecoder:
    """The model of one token, its head untied from the embedding: `linear` makes it, as it makes every layer.

    The context projection is in the compute type `dtype`: a bfloat16 checkpoint's numbers keep all their digits in
    float16. Raises UserError where weights and tables are of two checkpoints.
    """
    tables.refuse_weights_of_another(weights.checkpoint_digest)
    meta = tables.meta
    embeds = GatherEmbeds(_embedding(tables), meta.embed_scale_main, torch.float32)
    mix = PerLayerMix(
        DenseLinear(torch.from_numpy(tables.projection).to(dtype)),
        RMSNorm(torch.from_numpy(tables.projection_norm), meta.rms_eps),
        layers=meta.layers,
        projection_scale=meta.proj_scale,
        input_scale=meta.input_scale,
        dtype=dtype,
    )
    head = LogitsHead(linear(HEAD_WEIGHT), weights.config.final_logit_softcapping, dtype)
    return TokenDecoder(embeds, mix, Decoder(weights, linear, dtype), head, meta.embed_scale_pl)


def _embedding(tables: Tables) -> Table:
    match tables:
        case RawTables():
            return RowTable(torch.from_numpy(tables.embed_rows), torch.from_numpy(tables.embed_scale))
        case Int4Tables():
            return Int4Table(torch.from_numpy(tables.embed_codes), torch.from_numpy(tables.embed_steps))
    raise TypeError(f"no embedding is known for {type(tables).__name__}")
