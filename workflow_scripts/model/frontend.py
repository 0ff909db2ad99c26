"""Front end: token ids -> embeddings and per-layer inputs, from int8 rows that are gathered before they are scaled.

Source: HF transformers, models/gemma4/modeling_gemma4.py (get_per_layer_inputs, project_per_layer_inputs).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.model.norm import RMSNorm, as_dtype, as_float32


def gather_rows(rows: Tensor, scale: Tensor, input_ids: Tensor) -> Tensor:
    """int8 [V, width] and float32 [V] by ids [1, 1] int32 -> [1, 1, width] float32; nothing else is expanded."""
    ids = input_ids.reshape(-1)
    picked = torch.index_select(rows, 0, ids).to(torch.float32)
    return (picked * torch.index_select(scale, 0, ids)[:, None])[None]


class RowTable(nn.Module):
    """A table of int8 rows with one scale per row; only the asked rows are ever expanded."""

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[1, 1] int32 -> [1, 1, width] float32."""
        return gather_rows(self.rows, self.scale, input_ids)


class GatherEmbeds(nn.Module):
    """Function `gather_embeds`: input_ids [1, 1] -> inputs_embeds [1, 1, hidden], scaled by sqrt(hidden)."""

    def __init__(self, table: RowTable, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.scale, self.dtype = table, scale, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """See the class."""
        return as_dtype(self.table(input_ids) * self.scale, self.dtype)


class PerLayerMix(nn.Module):
    """Embedding and token part -> per_layer_inputs [1, 1, layers, ple_dim] float32.

    The context part is projected from the embedding, scaled, and normed per layer with one shared weight; both parts
    are added and scaled by 2^-0.5. `dtype` is the type that the projection takes.
    """

    def __init__(
        self,
        projection: nn.Module,
        norm: RMSNorm,
        layers: int,
        projection_scale: float,
        input_scale: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.projection, self.norm, self.layers, self.dtype = projection, norm, layers, dtype
        self.projection_scale, self.input_scale = projection_scale, input_scale

    def forward(self, inputs_embeds: Tensor, token: Tensor) -> Tensor:
        """inputs_embeds [1, 1, hidden] scaled by sqrt(hidden); token [1, 1, layers, ple_dim], by sqrt(ple_dim)."""
        context = as_float32(self.projection(as_dtype(inputs_embeds, self.dtype))) * self.projection_scale
        return (self.norm(context.reshape(1, 1, self.layers, -1)) + token) * self.input_scale


class GatherPerLayer(nn.Module):
    """Function `gather_per_layer`: ids and embeddings -> per_layer_inputs [1, 1, layers, ple_dim]."""

    def __init__(self, table: RowTable, mix: PerLayerMix, token_scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.mix, self.token_scale, self.dtype = table, mix, token_scale, dtype

    def forward(self, input_ids: Tensor, inputs_embeds: Tensor) -> Tensor:
        """See the class."""
        token = self.table(input_ids).reshape(1, 1, self.mix.layers, -1) * self.token_scale
        return as_dtype(self.mix(inputs_embeds, token), self.dtype)
