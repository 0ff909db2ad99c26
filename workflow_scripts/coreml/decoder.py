"""The decoder of the Core ML reference: as graph form `decode_ring`, with a pruned head and a token's per-layer row.

Its caches are buffers, which become the states of the package. There they are float16, the only type that Core ML has
for a state; all else is computed in float32.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.errors import UserError
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import additive
from workflow_scripts.model.kv_state import RingColumn, StateCaches
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import FULL_CACHES, SLIDING_CACHES, FunctionSpec, TensorSpec, decode_ring
from workflow_scripts.model.token_decoder import TokenDecoder, token_decoder
from workflow_scripts.quantize.weights import Linear, Weights
from workflow_scripts.tables.raw import RawTables

STATE_DTYPE = "float16"


@torch.library.custom_op("gemma4::shift_scale", mutates_args=())
def shift_scale(codes: Tensor, steps: Tensor) -> Tensor:
    """Codes int8 [N, K] times a step float32 [N, K / block] each -> weights float32 [N, K].

    An operator of its own, so that the converter keeps the stored codes and does not fold the product.
    """
    blocks = codes.to(torch.float32).reshape(*steps.shape, -1)
    return (blocks * steps.to(torch.float32)[..., None]).reshape(codes.shape)


@shift_scale.register_fake
def _(codes: Tensor, steps: Tensor) -> Tensor:
    return torch.empty(codes.shape, dtype=torch.float32)


class ShiftScaleLinear(nn.Module):
    """y = x W^T with W [N, K] as stored codes int8 and a step float16 per block of a row."""

    def __init__(self, stored: Linear) -> None:
        super().__init__()
        self.register_buffer("codes", torch.from_numpy(stored.codes))
        self.register_buffer("steps", torch.from_numpy(stored.steps))

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] float32 -> [..., N] float32."""
        return nn.functional.linear(x, shift_scale(self.codes, self.steps))


class StateDecoder(nn.Module):
    """One token a call; inputs and output in the order of `signature`, states under its names."""

    def __init__(self, model: TokenDecoder, states: dict[str, TensorSpec], context: int) -> None:
        super().__init__()
        self.model, self.column = model, RingColumn(model.decoder.config.sliding_window, context)
        for name, spec in states.items():
            self.register_buffer(name, torch.zeros(spec.shape, dtype=torch.float32))

    def forward(self, input_ids: Tensor, position_ids: Tensor, ple_tokens: Tensor) -> Tensor:
        """`position_ids` [1, 1] is the current position; ple_tokens as for `TokenDecoder`."""
        config, position = self.model.decoder.config, position_ids[0]
        masks = {kind: additive(seen, torch.float32) for kind, seen in self.column.seen(position).items()}
        caches = {
            kind: KeyValue(*(getattr(self, name) for name in names))
            for kind, names in ((SLIDING, SLIDING_CACHES), (FULL, FULL_CACHES))
        }
        state = StateCaches(config, caches, self.column.columns(position))
        logits = self.model(input_ids, position_ids, ple_tokens, masks, state)
        state.write()
        return logits


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


def state_decoder(weights: Weights, tables: RawTables, ids: Sequence[int], context: int) -> StateDecoder:
    """The model over stored codes, whose head has the rows `ids`.

    Raises UserError where a matrix is no linear code of 4 bits, or weights and tables are of two checkpoints.
    """
    model = token_decoder(weights, tables, pruned_linears(weights, ids), torch.float32)
    return StateDecoder(model, interface(weights, context, len(ids)).states, context).eval()


def pruned_linears(weights: Weights, ids: Sequence[int]) -> LinearFactory:
    """The layers of `stored_linear`."""
    return lambda name: ShiftScaleLinear(stored_linear(weights, name, ids))


def stored_linear(weights: Weights, name: str, ids: Sequence[int]) -> Linear:
    """The codes and steps of a matrix; of the head, its rows `ids`.

    Raises UserError where the recipe has no linear codes of 4 bits there.
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
    return replace(stored, codes=stored.codes[rows], steps=stored.steps[rows])


def exported(model: StateDecoder, spec: FunctionSpec) -> torch.export.ExportedProgram:
    """The model as a graph, in float32, its attention in plain operators.

    The converter's own operator for attention has a fixed scale and takes no masks of this form.
    """
    examples = tuple(
        torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in spec.inputs.values()
    )
    program = torch.export.export(model, examples, strict=False)
    return program.run_decompositions({torch.ops.aten.scaled_dot_product_attention.default: _attention})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `Attention` calls it: with a mask, without a scale."""
    if attn_mask is None or dropout_p or is_causal or scale != 1.0 or enable_gqa:
        raise ValueError("the decoder calls attention otherwise than is known here")
    return torch.softmax(query @ key.transpose(-1, -2) + attn_mask, dim=-1) @ value
