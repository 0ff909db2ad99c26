"""Which large constants a bundle must hold: every stored tensor by the name of its content.

Constants under 256 elements and constants of one repeated value stand inside the program's text (see
`coreai/private.py`), so they are not listed.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from workflow_scripts.gates.structure import content_name
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
    return _by_content(
        [
            ("embed rows", tables.embed_rows),
            ("embed scale", tables.embed_scale),
            ("per-layer rows", tables.per_layer_rows),
            ("per-layer scale", tables.per_layer_scale),
            ("projection", tables.projection),
            ("projection norm", tables.projection_norm),
        ]
    )


def _tensors(weights: Weights, names: list[str], compute: str) -> Iterator[tuple[str, np.ndarray]]:
    """Codes keep their width; codebooks and dense values are in the compute type, vectors in float32."""
    dtype = np.dtype(COMPUTE_DTYPES[compute])
    for name in names:
        if weights.index[name]["kind"] == "vector":
            yield name, weights.vector(name)
            continue
        stored = weights.linear(name)
        if isinstance(stored, Palette):
            yield f"{name} (indices)", stored.indices
            yield f"{name} (codebook)", stored.codebook.astype(dtype, copy=False)
        else:
            yield name, stored.array.astype(dtype, copy=False)


def _by_content(tensors: Iterable[tuple[str, np.ndarray]]) -> Stored:
    return {
        content_name(memoryview(np.ascontiguousarray(array)).cast("B")): (name, array.nbytes)
        for name, array in tensors
        if array.size >= _INLINE_LIMIT and not (array == array.reshape(-1)[0]).all()
    }
