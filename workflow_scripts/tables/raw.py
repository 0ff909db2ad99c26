"""The raw gather dump in int8, read as a device reads it: mapped files and numpy, nothing else.

Seven files, little-endian, in C order, without headers (V vocabulary, D hidden, L layers, ld per layer, PLD = L * ld):

- `embed_tokens.i8` int8 [V, D] and `embed_tokens.scale.f32` float32 [V]: a value is its number times its row's scale;
- `embed_per_layer.i8` int8 [V, PLD], a row being L vectors of ld, and `embed_per_layer.scale.f32` float32 [V];
- `proj.f32` float32 [PLD, D], the context projection, and `proj_norm.f32` float32 [ld], its norm's weight;
- `meta.json`, the sizes and factors (`dump.Meta`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from workflow_scripts.tables.dump import (
    EMBED,
    FLOAT,
    META,
    PER_LAYER,
    Meta,
    Tables,
    map_file,
    map_projection,
)

_ROWS = np.dtype(np.int8)


@dataclass(frozen=True)
class RawTables(Tables):
    """`embed_rows` int8 [V, D], `embed_scale` float32 [V], `per_layer_rows` int8 [V, PLD], `per_layer_scale`
    float32 [V]."""

    FORMAT: ClassVar[str] = "int8"

    embed_rows: np.ndarray
    embed_scale: np.ndarray
    per_layer_rows: np.ndarray
    per_layer_scale: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map the seven files of a dump. Raises UserError naming a file that is missing or has a wrong size."""
        meta = Meta.read(folder / META, {})
        vocab = meta.vocab_size
        return cls(
            meta,
            **map_projection(folder, meta),
            embed_rows=map_file(folder / rows_file(EMBED), _ROWS, (vocab, meta.hidden_size)),
            embed_scale=map_file(folder / scale_file(EMBED), FLOAT, (vocab,)),
            per_layer_rows=map_file(folder / rows_file(PER_LAYER), _ROWS, (vocab, meta.row_size)),
            per_layer_scale=map_file(folder / scale_file(PER_LAYER), FLOAT, (vocab,)),
        )

    def embed_values(self, ids: np.ndarray) -> np.ndarray:
        """See `Tables`."""
        return _gather(self.embed_rows, self.embed_scale, ids)

    def per_layer_values(self, ids: np.ndarray) -> np.ndarray:
        """See `Tables`."""
        return _gather(self.per_layer_rows, self.per_layer_scale, ids)

    def per_layer_arrays(self) -> dict[str, np.ndarray]:
        """See `Tables`."""
        return {"ple_table": self.per_layer_rows, "ple_scale": self.per_layer_scale}


def rows_file(table: str) -> str:
    """File name of a table's int8 rows."""
    return f"{table}.i8"


def scale_file(table: str) -> str:
    """File name of a table's scale per row."""
    return f"{table}.scale.f32"


def _gather(rows: np.ndarray, scale: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return rows[ids].astype(np.float32) * scale[ids, None]
