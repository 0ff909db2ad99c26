"""Which large constants the bundles whose kv_cache is a state must hold, for the gate `structure`.

As in `stored_weights`; token decoders have the embedding of the raw tables beside their head, and what writes static
caches has the numbers of their columns.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from workflow_scripts.gates.stored_weights import Cast, Constant, Held, held, weight_constants
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.dump import Tables
from workflow_scripts.tables.int4 import Int4Tables, code_pairs
from workflow_scripts.tables.raw import RawTables

Labelled = Iterator[tuple[str, Constant]]


def state_core_constants(form: str, weights: Weights, context: int, compute: str) -> Held:
    """Constants of a core: all matrices and vectors but the head, and what its function `step` writes columns by."""

    def constants() -> Labelled:
        yield from weight_constants(weights, [name for name in weights.index if name != HEAD_WEIGHT], compute)
        if form != "blend_core":  # its host says which column
            yield from _columns(context)
        if form == "ring_core":
            window = weights.config.sliding_window
            yield from _ring(window, context)
            yield "second round of the ring", Cast(np.arange(window, 2 * window, dtype=np.int32))

    return held(weights, constants(), compute)


def decoder_constants(weights: Weights, tables: Tables, capacities: Sequence[int], compute: str) -> Held:
    """Constants of a token decoder: everything, the head by itself. Rings have `capacities`, growing caches none."""

    def constants() -> Labelled:
        yield from weight_constants(weights, weights.index, compute)
        yield from _front_end(tables, np.dtype(COMPUTE_DTYPES[compute]))
        for capacity in capacities:
            yield from _columns(capacity)
            yield from _ring(weights.config.sliding_window, capacity)

    return held(weights, constants(), compute)


def _front_end(tables: Tables, dtype: np.dtype) -> Labelled:
    """The embedding as it is in the tables, and the context projection in the compute type."""
    match tables:
        case RawTables():
            arrays = {"embed rows": tables.embed_rows, "embed scale": tables.embed_scale}
        case Int4Tables():
            arrays = {
                "embed codes": tables.embed_codes,
                "embed steps": tables.embed_steps,
                "codes of a byte": code_pairs(),
            }
    for label, array in arrays.items():
        yield label, Cast(array)
    yield "projection", Cast(tables.projection, dtype)
    yield "projection norm", Cast(tables.projection_norm)


def _columns(count: int) -> Labelled:
    yield f"columns of {count}", Cast(np.arange(count, dtype=np.int32))


def _ring(window: int, positions: int) -> Labelled:
    numbers = np.arange(positions, dtype=np.int32)
    yield f"columns of the ring of {window}", Cast(np.arange(window, dtype=np.int32))
    yield f"column of each of {positions} positions", Cast(numbers % np.int32(window))
