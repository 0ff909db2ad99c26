"""Graph form `ane_head`: hidden state -> token id in operators that the Neural Engine runs.

The form `head_argmax` gives the same, but by the checked list (`coreai/ane_rules.py`) the engine runs none of it: its
product is a matmul by stored weights, has more rows than an axis may have, and its argmax goes over more than 2048
values. Here the rows are convolutions of at most 16384, the maximum is taken in tiles of at most 2048, and only the
last choice, between the tiles' winners, is made in integers: float16 cannot count to 262144, so that it falls to the
processor.
"""

from math import gcd

import torch
from torch import Tensor, nn

from workflow_scripts.errors import UserError
from workflow_scripts.model.ane_conv import stored_conv
from workflow_scripts.model.ane_rows import BLOCK_ROWS, rows_of
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.weights import Weights

TILE_ROWS = 2048


class AneHead(nn.Module):
    """hidden [1, 1, hidden] float32 -> token_id [1, 1] int32; of equal scores the lowest id.

    `blocks` are convolutions [1, hidden, 1, 1] -> [1, rows, 1, 1], one after the other the rows of the matrix.
    """

    def __init__(self, blocks: list[nn.Module], tile: int, vocabulary: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks, self.tile, self.dtype = nn.ModuleList(blocks), tile, dtype
        first_ids = torch.arange(0, vocabulary, tile, dtype=torch.int32)
        self.register_buffer("first_ids", first_ids.reshape(1, 1, -1, 1))
        self.register_buffer("beyond", torch.full_like(self.first_ids, vocabulary))

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        x = hidden.to(self.dtype).reshape(1, -1, 1, 1)
        tiles = [block(x).reshape(1, 1, -1, self.tile) for block in self.blocks]
        best = torch.cat([tile.amax(-1, keepdim=True) for tile in tiles], 2)
        places = torch.cat([tile.argmax(-1, keepdim=True).to(torch.int32) for tile in tiles], 2)
        winners = torch.where(best == best.amax(2, keepdim=True), places + self.first_ids, self.beyond)
        return winners.amin(2).reshape(1, 1)


def exported_head(weights: Weights, dtype: torch.dtype) -> AneHead:
    """The head that carries the artifact's stored codes into a bundle.

    Raises UserError for a vocabulary that no tile of 32 rows and more divides: a palette's codebook has 32 rows.
    """
    vocabulary = weights.config.vocab_size
    block, tile = gcd(vocabulary, BLOCK_ROWS), gcd(vocabulary, TILE_ROWS)
    if tile < 32:
        raise UserError(
            f"vocab_size is {vocabulary}: a head for the Neural Engine needs a multiple of 32, better of {TILE_ROWS}"
        )
    matrix = weights.linear(HEAD_WEIGHT)
    blocks = [
        stored_conv(rows_of(matrix, first, first + block), dtype) for first in range(0, vocabulary, block)
    ]
    return AneHead(blocks, tile, vocabulary, dtype)
