"""The raw gather dump, read as a device reads it: mapped files and numpy, nothing else.

Seven files, little-endian, in C order, without headers (V vocabulary, D hidden, L layers, ld per layer, PLD = L * ld):

- `embed_tokens.i8` int8 [V, D] and `embed_tokens.scale.f32` float32 [V]: a value is its number times its row's scale;
- `embed_per_layer.i8` int8 [V, PLD], a row being L vectors of ld, and `embed_per_layer.scale.f32` float32 [V];
- `proj.f32` float32 [PLD, D], the context projection, and `proj_norm.f32` float32 [ld], its norm's weight;
- `meta.json`, the sizes and factors (`Meta`).
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from workflow_scripts.errors import UserError

META = "meta.json"
EMBED, PER_LAYER = "embed_tokens", "embed_per_layer"
PROJECTION, PROJECTION_NORM = "proj.f32", "proj_norm.f32"
FLOAT = np.dtype("<f4")

_KEYS = {"vocab_size": "V", "hidden_size": "D", "row_size": "PLD", "layers": "L", "layer_size": "ld"}


@dataclass(frozen=True)
class Meta:
    """Sizes and factors of a dump. In `meta.json` the sizes have the published keys V, D, PLD, L and ld."""

    vocab_size: int
    hidden_size: int
    row_size: int
    layers: int
    layer_size: int
    embed_scale_main: float
    embed_scale_pl: float
    proj_scale: float
    input_scale: float
    rms_eps: float

    def to_json(self) -> dict[str, Any]:
        """The content of `meta.json`."""
        return {_KEYS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `meta.json`. Raises UserError naming the key that is missing, unknown or no sensible number."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{path.parent} is not a raw gather dump: it has no {path.name}") from None
        except ValueError:
            raise UserError(f"{path} is not readable JSON: build the tables again") from None
        names = {_KEYS.get(field.name, field.name): field for field in fields(cls)}
        if not isinstance(raw, dict) or raw.keys() != names.keys():
            wrong = ", ".join(sorted(names.keys() ^ set(raw))) if isinstance(raw, dict) else "no JSON object"
            raise UserError(f"{path} has missing or unknown keys ({wrong}): build the tables again")
        for key, field in names.items():
            if type(raw[key]) not in (int, field.type) or not 0 < raw[key] < math.inf:
                raise UserError(f"{path}: {key} is {raw[key]!r}, not a {field.type.__name__} above 0")
        meta = cls(**{field.name: raw[key] for key, field in names.items()})
        if meta.row_size != meta.layers * meta.layer_size:
            raise UserError(f"{path}: PLD is {meta.row_size}, not L x ld = {meta.layers * meta.layer_size}")
        return meta


@dataclass(frozen=True)
class RawTables:
    """A mapped dump: `embed_rows` int8 [V, D], `embed_scale` float32 [V], `per_layer_rows` int8 [V, PLD],
    `per_layer_scale` float32 [V], `projection` float32 [PLD, D], `projection_norm` float32 [ld]."""

    meta: Meta
    embed_rows: np.ndarray
    embed_scale: np.ndarray
    per_layer_rows: np.ndarray
    per_layer_scale: np.ndarray
    projection: np.ndarray
    projection_norm: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map the seven files of a dump. Raises UserError naming a file that is missing or has a wrong size."""
        meta = Meta.read(folder / META)
        vocab, hidden, row = meta.vocab_size, meta.hidden_size, meta.row_size
        return cls(
            meta,
            _map(folder / rows_file(EMBED), np.dtype(np.int8), (vocab, hidden)),
            _map(folder / scale_file(EMBED), FLOAT, (vocab,)),
            _map(folder / rows_file(PER_LAYER), np.dtype(np.int8), (vocab, row)),
            _map(folder / scale_file(PER_LAYER), FLOAT, (vocab,)),
            _map(folder / PROJECTION, FLOAT, (row, hidden)),
            _map(folder / PROJECTION_NORM, FLOAT, (meta.layer_size,)),
        )

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Scaled embeddings, float32 [S, D], of token ids [S]. Raises UserError for an id outside the vocabulary."""
        self._check(ids)
        return _gather(self.embed_rows, self.embed_scale, ids) * np.float32(self.meta.embed_scale_main)

    def token_part(self, ids: np.ndarray) -> np.ndarray:
        """The per-layer table's rows, scaled: float32 [S, L, ld] of token ids [S]. Raises UserError like `embed`."""
        self._check(ids)
        rows = _gather(self.per_layer_rows, self.per_layer_scale, ids) * np.float32(self.meta.embed_scale_pl)
        return rows.reshape(len(ids), self.meta.layers, self.meta.layer_size)

    def per_layer_inputs(self, ids: np.ndarray, embeds: np.ndarray) -> np.ndarray:
        """The decoder's per-layer inputs, float32 [S, L, ld], of token ids [S] and their `embed` [S, D].

        The token's own part plus the normalized projection of its embedding, each divided by sqrt(2)
        (HF `modeling_gemma4.py`: get_per_layer_inputs, project_per_layer_inputs).
        """
        meta, tokens = self.meta, self.token_part(ids)
        context = ((embeds @ self.projection.T) * np.float32(meta.proj_scale)).reshape(tokens.shape)
        mean_square = np.mean(context * context, axis=-1, keepdims=True)
        context = context / np.sqrt(mean_square + np.float32(meta.rms_eps)) * self.projection_norm
        return (context + tokens) * np.float32(meta.input_scale)

    def _check(self, ids: np.ndarray) -> None:
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"token ids must be a vector of integers, not {ids.dtype} {list(ids.shape)}")
        wrong = ids[(ids < 0) | (ids >= self.meta.vocab_size)]
        if len(wrong):
            raise UserError(
                f"token id {wrong[0]} is outside the tables' vocabulary of {self.meta.vocab_size}"
            )


def rows_file(table: str) -> str:
    """File name of a table's int8 rows."""
    return f"{table}.i8"


def scale_file(table: str) -> str:
    """File name of a table's scale per row."""
    return f"{table}.scale.f32"


def _gather(rows: np.ndarray, scale: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return rows[ids].astype(np.float32) * scale[ids, None]


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    expected = math.prod(shape) * dtype.itemsize
    if not path.is_file():
        raise UserError(f"{path} is missing: build the tables again")
    if path.stat().st_size != expected:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, but {META} says {list(shape)}, which is {expected}"
        )
    # Copy-on-write: torch takes only writable memory, and the file never changes.
    return np.memmap(path, dtype, "c", shape=shape)
