"""Which large constants the bundles of a Neural Engine set must hold, for the gate `structure`.

As in `stored_weights`, but for three things: all vectors are in the compute type, a chunk stores the rotations of its
positions, and the head's matrix comes in blocks of rows.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from workflow_scripts.gates.stored_weights import Cast, Constant, Held, held, matrix_constants
from workflow_scripts.model.ane_rows import BLOCK_ROWS, rows_of
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.rotary_table import rotary_table
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.quantize.weights import Weights


def chunk_constants(weights: Weights, layers: Sequence[int], context: int, compute: str) -> Held:
    """Constants of the chunk of layers [first, last)."""
    constants = _chunk_tensors(weights, layers, context, np.dtype(COMPUTE_DTYPES[compute]))
    return held(weights, constants, compute)


def ane_head_constants(weights: Weights, compute: str) -> Held:
    """Constants of a head."""
    matrix, rows = weights.linear(HEAD_WEIGHT), weights.config.vocab_size
    block = int(np.gcd(rows, BLOCK_ROWS))
    dtype = np.dtype(COMPUTE_DTYPES[compute])
    constants = (
        entry
        for first in range(0, rows, block)
        for entry in matrix_constants(
            f"{HEAD_WEIGHT} from row {first} on", rows_of(matrix, first, first + block), dtype
        )
    )
    return held(weights, constants, compute)


def _chunk_tensors(
    weights: Weights, layers: Sequence[int], context: int, dtype: np.dtype
) -> Iterator[tuple[str, Constant]]:
    config = weights.config
    prefixes = tuple(f"layers.{layer}." for layer in range(*layers))
    ends = layers[1] == config.num_hidden_layers
    for name, entry in weights.index.items():
        if not (name.startswith(prefixes) or (ends and name == "norm.weight")):
            continue
        if entry["kind"] == "vector":
            yield name, Cast(weights.vector(name), dtype)
        else:
            yield from matrix_constants(name, weights.linear(name), dtype)
    for kind in sorted(set(config.layer_types[slice(*layers)])):
        head_dim = config.layer_head_dim(config.layer_types.index(kind))
        rows = rotary_table(config.rope[kind], head_dim, context).reshape(context, -1)
        yield f"rotations of {kind}", Cast(np.ascontiguousarray(rows.T), dtype)
