"""What both layouts of the raw gather dump share: its `meta.json`, its context projection, and the arithmetic.

Files are little-endian, in C order, without headers. The two tables differ from layout to layout (`raw.py`, `int4.py`);
`proj.f32` float32 [PLD, D] is the context projection and `proj_norm.f32` float32 [ld] its norm's weight in both.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from workflow_scripts.errors import UserError

META = "meta.json"
EMBED, PER_LAYER = "embed_tokens", "embed_per_layer"
PROJECTION, PROJECTION_NORM = "proj.f32", "proj_norm.f32"
FLOAT = np.dtype("<f4")

_KEYS = {"vocab_size": "V", "hidden_size": "D", "row_size": "PLD", "layers": "L", "layer_size": "ld"}
_LAYOUT_KEYS = ("format", "block_size")


@dataclass(frozen=True)
class Meta:
    """Sizes and factors of a dump. In `meta.json` the sizes have the published keys V, D, PLD, L and ld.

    `checkpoint` is the digest of the checkpoint that the dump was made from. Readers of published dumps pass over it.
    """

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
    checkpoint: str

    def to_json(self) -> dict[str, Any]:
        """The content of `meta.json`, apart from the keys of the layout."""
        return {_KEYS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}

    @classmethod
    def read(cls, path: Path, layout: Mapping[str, Any]) -> Self:
        """Read `meta.json`, which must have the keys of the layout with their values beside its own.

        Raises UserError naming the key that is missing, unknown or no sensible number, and for another layout.
        """
        raw = read_object(path)
        found = {key: raw.pop(key) for key in _LAYOUT_KEYS if key in raw}
        if found != layout:
            raise UserError(f"{path} is of tables with {_said(found)}, not with {_said(layout)}")
        names = {_KEYS.get(field.name, field.name): field for field in fields(cls)}
        if raw.keys() != names.keys():
            wrong = ", ".join(sorted(names.keys() ^ raw.keys()))
            raise UserError(f"{path} has missing or unknown keys ({wrong}): build the tables again")
        for key, field in names.items():
            if not _sensible(raw[key], field.type):
                kind = "digest" if field.type is str else f"{field.type.__name__} above 0"
                raise UserError(f"{path}: {key} is {raw[key]!r}, not a {kind}")
        meta = cls(**{field.name: raw[key] for key, field in names.items()})
        if meta.row_size != meta.layers * meta.layer_size:
            raise UserError(f"{path}: PLD is {meta.row_size}, not L x ld = {meta.layers * meta.layer_size}")
        return meta


@dataclass(frozen=True)
class Tables(ABC):
    """A mapped dump of either layout: `projection` float32 [PLD, D], `projection_norm` float32 [ld]."""

    FORMAT: ClassVar[str]
    """The layout's name, by which a bundle says what it was made with."""

    meta: Meta
    projection: np.ndarray
    projection_norm: np.ndarray

    @abstractmethod
    def embed_values(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the embedding as they are stored, float32 [S, D], of ids [S] in the vocabulary."""

    @abstractmethod
    def per_layer_values(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the per-layer table as they are stored, float32 [S, PLD], of ids [S] in the vocabulary."""

    @abstractmethod
    def per_layer_arrays(self) -> dict[str, np.ndarray]:
        """The whole per-layer table by the names of the inputs of graph forms that take it (`decode_tbl`)."""

    def refuse_weights_of_another(self, checkpoint: str) -> None:
        """Raise UserError where `checkpoint`, the identity that weights have, is not the tables'."""
        if checkpoint != self.meta.checkpoint:
            raise UserError(
                f"the weights are of checkpoint {checkpoint[:12]}, the tables of {self.meta.checkpoint[:12]}: build "
                "both from one checkpoint"
            )

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """Scaled embeddings, float32 [S, D], of token ids [S]. Raises UserError for an id outside the vocabulary."""
        self._check(ids)
        return self.embed_values(ids) * np.float32(self.meta.embed_scale_main)

    def token_part(self, ids: np.ndarray) -> np.ndarray:
        """The per-layer table's rows, scaled: float32 [S, L, ld] of token ids [S]. Raises UserError like `embed`."""
        self._check(ids)
        rows = self.per_layer_values(ids) * np.float32(self.meta.embed_scale_pl)
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a `meta.json`. Raises UserError where there is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} is not a raw gather dump: it has no {path.name}") from None
    except ValueError:
        raise UserError(f"{path} is not readable JSON: build the tables again") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object: build the tables again")
    return raw


def map_file(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map a file of a dump. Raises UserError naming it where it is missing or has a wrong size."""
    expected = math.prod(shape) * dtype.itemsize
    if not path.is_file():
        raise UserError(f"{path} is missing: build the tables again")
    if path.stat().st_size != expected:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, but {META} says {list(shape)}, which is {expected}"
        )
    # Copy-on-write: torch takes only writable memory, and the file never changes.
    return np.memmap(path, dtype, "c", shape=shape)


def map_projection(folder: Path, meta: Meta) -> dict[str, np.ndarray]:
    """The two files that both layouts have, as the fields of `Tables`. Raises UserError as `map_file` does."""
    return {
        "projection": map_file(folder / PROJECTION, FLOAT, (meta.row_size, meta.hidden_size)),
        "projection_norm": map_file(folder / PROJECTION_NORM, FLOAT, (meta.layer_size,)),
    }


def _sensible(value: Any, kind: type) -> bool:
    if kind is str:
        return isinstance(value, str) and value != ""
    return type(value) in (int, kind) and 0 < value < math.inf


def _said(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.items()) or "int8 rows"
