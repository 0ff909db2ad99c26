"""What the Core ML reference holds, by name: interface and matrices. Pure data: no torch, no coremltools here."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import FunctionSpec, TensorSpec, decode_ring
from workflow_scripts.quantize.weights import Linear, Weights
from workflow_scripts.tables.raw import RawTables

PACKAGE = ".mlpackage"
SPECIFICATION = 9
"""Version of Core ML's format with states and 4-bit codes: iOS 18, macOS 15."""
STATE_DTYPE = "float16"
"""The only type that Core ML has for a state."""


def interface(weights: Weights, context: int, rows: int) -> FunctionSpec:
    """Inputs, output and states of the package. Raises UserError where the checkpoint has fewer positions."""
    config = weights.config
    (ring,) = decode_ring(config, context, "fp32", capacities=(context,), tables="int8").values()
    ple = (1, 1, config.num_hidden_layers, config.hidden_size_per_layer_input)
    return FunctionSpec(
        {
            "input_ids": ring.inputs["input_ids"],
            "position_ids": ring.inputs["position_ids"],
            "ple_tokens": TensorSpec("float32", ple),
        },
        {"logits": TensorSpec("float32", (1, 1, rows))},
        {name: replace(spec, dtype=STATE_DTYPE) for name, spec in ring.states.items()},
    )


def stored_linear(weights: Weights, name: str, ids: Sequence[int]) -> Linear:
    """The codes and steps of a matrix; of the head, its rows `ids`.

    Raises UserError where the recipe has no linear codes of 4 bits there, or the head no row for one of the ids.
    """
    stored = weights.linear(name)
    if not isinstance(stored, Linear) or stored.bits != 4:
        raise UserError(
            f"the recipe {weights.recipe} stores {name} otherwise than as linear codes of 4 bits, which the Core ML "
            "reference has: set coreml.recipe to one that does"
        )
    if name != HEAD_WEIGHT:
        return stored
    rows = np.asarray(ids)
    if rows.max() >= len(stored.codes):
        raise UserError(
            f"the tokenizer has id {rows.max()}, and the head {len(stored.codes)} rows: they are of different models"
        )
    return replace(stored, codes=stored.codes[rows], steps=stored.steps[rows])


def token_part(tables: RawTables, token: int) -> np.ndarray:
    """The input `ple_tokens` of a token: float32 [1, 1, layers, ple_dim]."""
    row = tables.per_layer_values(np.array([token])) * np.float32(tables.meta.embed_scale_pl)
    return row.astype(np.float32).reshape(1, 1, tables.meta.layers, -1)
