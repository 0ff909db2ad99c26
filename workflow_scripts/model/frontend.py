"""Front end: token ids -> embeddings and per-layer inputs, from stored rows that are gathered before they are expanded.

Source: HF transformers, models/gemma4/modeling_gemma4.py (get_per_layer_inputs, project_per_layer_inputs).
"""

import torch
from torch import Tensor, nn

from workflow_scripts.model.norm import RMSNorm, as_dtype, as_float32
from workflow_scripts.tables.int4 import code_pairs


class GatherRows(nn.Module):
    """Picks rows of a table of int8 rows with one scale per row."""

    def forward(self, input_ids: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
        """Ids [1, 1] int32, rows int8 [V, width], scale float32 [V] -> [1, 1, width] float32."""
        ids = input_ids.reshape(-1)
        picked = torch.index_select(rows, 0, ids).to(torch.float32)
        return (picked * torch.index_select(scale, 0, ids)[:, None])[None]


class GatherInt4(nn.Module):
    """Picks rows of a table of packed 4-bit codes with one step per block.

    A gather of 4-bit elements has no lowering (coreai-torch 0.4.3): so the bytes are gathered, and then from a table of
    all 256 bytes the two codes of each. The table is a buffer, so that it is named by content.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pairs", torch.from_numpy(code_pairs()))

    def forward(self, input_ids: Tensor, codes: Tensor, steps: Tensor) -> Tensor:
        """Ids [1, 1] int32, codes uint8 [V, width / 2], steps float16 [V, blocks] -> [1, 1, width] float32."""
        ids, blocks = input_ids.reshape(-1), steps.shape[1]
        packed = torch.index_select(codes, 0, ids).reshape(-1).to(torch.int32)
        levels = torch.index_select(self.pairs, 0, packed).reshape(blocks, -1)
        picked = torch.index_select(steps, 0, ids).to(torch.float32).reshape(blocks, 1)
        return (levels * picked).reshape(1, 1, -1)


class Table(nn.Module):
    """A stored table and how its rows are gathered: only the asked row is ever expanded."""

    def __init__(self, gather: nn.Module, rows: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.gather = gather
        self.register_buffer("rows", rows)
        self.register_buffer("scale", scale)

    def forward(self, input_ids: Tensor) -> Tensor:
        """[1, 1] int32 -> [1, 1, width] float32."""
        return self.gather(input_ids, self.rows, self.scale)


class RowTable(Table):
    """A table of int8 rows [V, width] with one scale float32 [V] per row."""

    def __init__(self, rows: Tensor, scale: Tensor) -> None:
        super().__init__(GatherRows(), rows, scale)


class Int4Table(Table):
    """A table of packed 4-bit codes uint8 [V, width / 2] with one step float16 [V, blocks] per block."""

    def __init__(self, codes: Tensor, steps: Tensor) -> None:
        super().__init__(GatherInt4(), codes, steps)


class GatherEmbeds(nn.Module):
    """Function `gather_embeds`: input_ids [1, 1] -> inputs_embeds [1, 1, hidden], scaled by sqrt(hidden)."""

    def __init__(self, table: Table, scale: float, dtype: torch.dtype) -> None:
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

    def __init__(self, table: Table, mix: PerLayerMix, token_scale: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.table, self.mix, self.token_scale, self.dtype = table, mix, token_scale, dtype

    def forward(self, input_ids: Tensor, inputs_embeds: Tensor) -> Tensor:
        """See the class."""
        token = self.table(input_ids).reshape(1, 1, self.mix.layers, -1) * self.token_scale
        return as_dtype(self.mix(inputs_embeds, token), self.dtype)
