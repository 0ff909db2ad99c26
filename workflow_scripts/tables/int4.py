"""The raw gather dump of a checkpoint from quantization-aware training, on whose 4-bit grid the tables lie.

Seven files, little-endian, in C order, without headers (V vocabulary, D hidden, L layers, ld per layer, PLD = L * ld; D
and PLD are multiples of 32):

- `embed_tokens.i4` uint8 [V, D / 2]: two codes in a byte. The value in column 2i of a row has the low nibble (bits 0-3)
  of byte i, the one in column 2i + 1 the high nibble (bits 4-7). A code is its nibble minus 8 (as in q4_0): -8..7;
- `embed_tokens.step.f16` float16 [V, D / 32]: a step for every 32 columns. A value is its code times the step of its
  column's block, a product that float32 holds exactly;
- `embed_per_layer.i4` uint8 [V, PLD / 2], a row being L vectors of ld, and `embed_per_layer.step.f16` [V, PLD / 32];
- `proj.f32` float32 [PLD, D], the context projection, and `proj_norm.f32` float32 [ld], its norm's weight;
- `meta.json`: as in int8 (`dump.Meta`), and `format` "int4-b32" and `block_size` 32.

Not two's complement: the codes of a tied head, which a bundle holds beside the embedding, would be the same bytes in
another element type, and constants are named by their bytes.

Rounded to bfloat16, nearly every value is the checkpoint's own; the others are off by float16's rounding of the step
(see `quantize/qat_grid.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.tables.dump import EMBED, META, PER_LAYER, Meta, Tables, map_file, map_projection

BLOCK_SIZE = 32
FORMAT = "int4-b32"
LAYOUT = {"format": FORMAT, "block_size": BLOCK_SIZE}
STEP = np.dtype("<f2")
_BYTES = np.dtype(np.uint8)


def code_pairs() -> np.ndarray:
    """float32 [256, 2]: the two codes of every byte, the low nibble's first."""
    byte = np.arange(256)
    return np.stack([byte & 15, byte >> 4], axis=-1).astype(np.float32) - 8


_PAIRS = code_pairs()


@dataclass(frozen=True)
class Int4Tables(Tables):
    """`embed_codes` uint8 [V, D / 2], `embed_steps` float16 [V, D / 32], `per_layer_codes` uint8 [V, PLD / 2],
    `per_layer_steps` float16 [V, PLD / 32]."""

    FORMAT: ClassVar[str] = FORMAT

    embed_codes: np.ndarray
    embed_steps: np.ndarray
    per_layer_codes: np.ndarray
    per_layer_steps: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map the seven files of a dump. Raises UserError naming a file that is missing or has a wrong size."""
        meta = Meta.read(folder / META, LAYOUT)
        for key, width in (("D", meta.hidden_size), ("PLD", meta.row_size)):
            if width % BLOCK_SIZE:
                raise UserError(f"{folder / META}: {key} is {width}, not a multiple of {BLOCK_SIZE}")
        return cls(
            meta,
            **map_projection(folder, meta),
            **_map_table(folder, "embed", EMBED, (meta.vocab_size, meta.hidden_size)),
            **_map_table(folder, "per_layer", PER_LAYER, (meta.vocab_size, meta.row_size)),
        )

    def embed_values(self, ids: np.ndarray) -> np.ndarray:
        """See `Tables`."""
        return decode_rows(self.embed_codes[ids], self.embed_steps[ids])

    def per_layer_values(self, ids: np.ndarray) -> np.ndarray:
        """See `Tables`."""
        return decode_rows(self.per_layer_codes[ids], self.per_layer_steps[ids])

    def per_layer_arrays(self) -> dict[str, np.ndarray]:
        """See `Tables`."""
        return {"ple_table": self.per_layer_codes, "ple_step": self.per_layer_steps}


def decode_rows(codes: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Packed codes uint8 [n, K / 2] and steps float16 [n, K / 32] -> values float32 [n, K]."""
    blocks = _PAIRS[codes].reshape(*steps.shape, BLOCK_SIZE) * steps.astype(np.float32)[..., None]
    return blocks.reshape(len(codes), -1)


def codes_file(table: str) -> str:
    """File name of a table's packed codes."""
    return f"{table}.i4"


def steps_file(table: str) -> str:
    """File name of a table's steps."""
    return f"{table}.step.f16"


def _map_table(folder: Path, field: str, table: str, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    rows, width = shape
    return {
        f"{field}_codes": map_file(folder / codes_file(table), _BYTES, (rows, width // 2)),
        f"{field}_steps": map_file(folder / steps_file(table), STEP, (rows, width // BLOCK_SIZE)),
    }
