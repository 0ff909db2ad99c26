"""The decoder of the Core ML reference: as graph form `decode_ring`, with a pruned head and a token's per-layer row.

Its caches are buffers, which become the states of the package. There they are float16, the only type that Core ML has
for a state; all else is computed in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.coreml.contents import interface, stored_linear
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import additive
from workflow_scripts.model.kv_state import RingColumn, StateCaches
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.model.signature import FULL_CACHES, SLIDING_CACHES, FunctionSpec, TensorSpec
from workflow_scripts.model.token_decoder import TokenDecoder, token_decoder
from workflow_scripts.quantize.weights import Linear, Weights
from workflow_scripts.tables.raw import RawTables


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


@torch.library.custom_op("gemma4::gelu_tanh", mutates_args=())
def gelu_tanh(x: Tensor) -> Tensor:
    """Gelu by its tanh approximation.

    An operator of its own, since coremltools 9.0 does not see the keyword that asks for it, and takes the exact one.
    """
    return nn.functional.gelu(x, approximate="tanh")


@gelu_tanh.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


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


def state_decoder(weights: Weights, tables: RawTables, ids: Sequence[int], context: int) -> StateDecoder:
    """The model over stored codes, whose head has the rows `ids`.

    Raises UserError where a matrix is no linear code of 4 bits, or weights and tables are of two checkpoints.
    """
    model = token_decoder(weights, tables, pruned_linears(weights, ids), torch.float32)
    return StateDecoder(model, interface(weights, context, len(ids)).states, context).eval()


def pruned_linears(weights: Weights, ids: Sequence[int]) -> LinearFactory:
    """Layers over stored codes."""
    return lambda name: ShiftScaleLinear(stored_linear(weights, name, ids))


def exported(model: StateDecoder, spec: FunctionSpec) -> torch.export.ExportedProgram:
    """The model as a graph in float32, without what the converter would not take as it is meant."""
    examples = tuple(
        torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype)) for tensor in spec.inputs.values()
    )
    program = torch.export.export(model, examples, strict=False)
    return program.run_decompositions(
        {
            torch.ops.aten.scaled_dot_product_attention.default: _attention,
            torch.ops.aten.gelu.default: _gelu,
        }
    )


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """As the decoder calls it."""
    if approximate != "tanh":
        raise ValueError("the decoder calls gelu otherwise than is known here")
    return gelu_tanh(x)


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
    """As `Attention` calls it, in plain operators: Core ML's own one scales by 1/sqrt(head_dim)."""
    if attn_mask is None or dropout_p or is_causal or scale != 1.0 or enable_gqa:
        raise ValueError("the decoder calls attention otherwise than is known here")
    return torch.softmax(query @ key.transpose(-1, -2) + attn_mask, dim=-1) @ value
