"""Front end: token ids -> embeddings and per-layer inputs, from int8 rows that are gathered before they are scaled.

Source: HF transformers, models/gemma4/modeling_gemma4.py (get_per_layer_inputs, project_per_layer_inputs).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.model.norm import RMSNorm, as_dtype, as_float32


class RowTable(nn.Module):
    """A table of int8 rows with one scale per row; only the asked rows are ever expanded."""

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[1, 1] int32 -> [1, 1, width] float32."""
        ids = input_ids.reshape(-1)
        picked = torch.index_select(self.rows, 0, ids).to(torch.float32)
        return (picked * torch.index_select(self.scale, 0, ids)[:, None])[None]


class GatherEmbeds(nn.Module):
    """Function `gather_embeds`: input_ids [1, 1] -> inputs_embeds [1, 1, hidden], scaled by sqrt(hidden)."""

    def __init__(self, table: RowTable, scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.scale, self.dtype = table, scale, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        """See the class."""
        return as_dtype(self.table(input_ids) * self.scale, self.dtype)


class GatherPerLayer(nn.Module):
    """Function `gather_per_layer`: ids and embeddings -> per_layer_inputs [1, 1, layers, ple_dim].

    The context part is projected from the embedding, scaled, and normed per layer with one shared weight; the
    token part is the table's row; both are added and scaled by 2^-0.5.
    """

    def __init__(
        self,
        table: RowTable,
        projection: nn.Module,
        norm: RMSNorm,
        layers: int,
        token_scale: float,
        projection_scale: float,
        input_scale: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.table, self.projection, self.norm, self.layers = table, projection, norm, layers
        self.token_scale, self.projection_scale, self.input_scale = token_scale, projection_scale, input_scale
        self.dtype = dtype

    def forward(self, input_ids: Tensor, inputs_embeds: Tensor) -> Tensor:
        """See the class."""
        shape = (1, 1, self.layers, -1)
        token = self.table(input_ids).reshape(shape) * self.token_scale
        context = self.projection(as_float32(inputs_embeds)) * self.projection_scale
        return as_dtype((self.norm(context.reshape(shape)) + token) * self.input_scale, self.dtype)
