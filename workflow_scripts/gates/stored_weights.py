"""Which large constants a bundle must hold: every stored tensor by the name of its content.

Constants under 256 elements and constants of one repeated value stand inside the program's text (see
`coreai/private.py`), so they are not listed.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.gates.blocks import row_blocks
from workflow_scripts.gates.structure import named
from workflow_scripts.model.frequencies import inverse_frequencies
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.quantize.weights import Palette, Weights
from workflow_scripts.tables.raw import RawTables

_INLINE_LIMIT = 256
Stored = dict[str, tuple[str, int]]
"""Content name -> (tensor, bytes)."""


def core_constants(weights: Weights, compute: str) -> Stored:
    """Constants of a core: every layer matrix and vector."""
    names = [name for name in weights.index if name != HEAD_WEIGHT]
    return _by_content(_tensors(weights, names, compute))


def head_constants(weights: Weights, compute: str) -> Stored:
    """Constants of a head."""
    return _by_content(_tensors(weights, [HEAD_WEIGHT], compute))


def frontend_constants(tables: RawTables) -> Stored:
    """Constants of a front end: the very rows of the raw tables, in int8."""
    arrays = {
        "embed rows": tables.embed_rows,
        "embed scale": tables.embed_scale,
        "per-layer rows": tables.per_layer_rows,
        "per-layer scale": tables.per_layer_scale,
        "projection": tables.projection,
        "projection norm": tables.projection_norm,
    }
    return _by_content((name, Cast(array)) for name, array in arrays.items())


def rotary_constants(config: TextConfig) -> frozenset[str]:
    """Content names of the rotary inverse frequencies of a core, as far as they are large: at E2B's head_dim of 512."""
    specs = {
        (config.rope[kind], config.layer_head_dim(layer)) for layer, kind in enumerate(config.layer_types)
    }
    arrays = [inverse_frequencies(rope, head_dim) for rope, head_dim in specs]
    return frozenset(_by_content(("inverse frequencies", Cast(array)) for array in arrays))


@dataclass(frozen=True)
class Cast:
    """An array in another dtype, converted block by block where its bytes are wanted."""

    array: np.ndarray
    dtype: np.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the other dtype."""
        return self.array.size * (self.dtype or self.array.dtype).itemsize

    def blocks(self) -> Iterator[np.ndarray]:
        """The elements in C order, as one-dimensional blocks."""
        flat = self.array.reshape(-1)
        for block in row_blocks(flat.shape):
            yield flat[block].astype(self.dtype or flat.dtype, copy=False)

    def in_text(self) -> bool:
        """Whether it stands in the program's text: it is small, or one value repeated."""
        if self.array.size < _INLINE_LIMIT:
            return True
        # The first block decides for nearly every tensor: a comparison of E2B's whole table would take 2.3 GB.
        first = self.array.reshape(-1)[0].astype(self.dtype or self.array.dtype)
        return all((block == first).all() for block in self.blocks())

    def content_name(self) -> str:
        """See `structure.content_name`."""
        digest = hashlib.sha256()
        for block in self.blocks():
            digest.update(block.data)
        return named(digest.hexdigest())


def _tensors(weights: Weights, names: list[str], compute: str) -> Iterator[tuple[str, Cast]]:
    """Codes keep their width; codebooks and dense values are in the compute type, vectors in float32."""
    dtype = np.dtype(COMPUTE_DTYPES[compute])
    for name in names:
        if weights.index[name]["kind"] == "vector":
            yield name, Cast(weights.vector(name))
            continue
        stored = weights.linear(name)
        if isinstance(stored, Palette):
            yield f"{name} (indices)", Cast(stored.indices)
            yield f"{name} (codebook)", Cast(stored.codebook, dtype)
        else:
            yield name, Cast(stored.array, dtype)


def _by_content(tensors: Iterable[tuple[str, Cast]]) -> Stored:
    return {cast.content_name(): (name, cast.nbytes) for name, cast in tensors if not cast.in_text()}
