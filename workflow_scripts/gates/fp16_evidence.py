"""Evidence that the graphs for the Neural Engine are right in its float16, by emulation in torch.

Every tensor between two operators is rounded to float16, and becomes infinite beyond 65504. Within an operator the
emulation takes what is reported of the engine (`coreai/ane_rules.py`): convolutions and LayerNorm sum wide. Where
reports differ it takes the worse: the two products of attention sum in one float16 accumulator, one product after the
other, as the Linux runtime does; and norms are also tried with a LayerNorm that a compiler has split into operators,
each of which rounds, with wide sums alone left to it. The activation tables of the engine are not emulated: they are
exact to half a unit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workflow_scripts.coreai.chunk_host import Arrays, Call, ChunkHost
from workflow_scripts.gates.numbers import project
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.ane_chunk import AneChunk
from workflow_scripts.model.ane_conv import eager_convs
from workflow_scripts.model.ane_layers import UnitRMS
from workflow_scripts.model.chunks import ChunkPlan, plan_json
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights

_aten = torch.ops.aten
_EPS = 1e-6
_LARGEST_HALF = 65504.0
# In units of u: the division by the scale, the norm's result, and the root mean square of what had been divided, which
# is off by at most one. Split, also difference, square, mean, sum and root: their roundings may all be of one sign.
_NORM_BOUND = {"one operator": 3 * 2.0**-11, "split": 8 * 2.0**-11}
_SIZES = (256, 512, 1536, 2560)  # of the heads and hidden states of E2B and E4B
_RMS = (0.02, 0.7, 30.0, 300.0, 1500.0)  # from a small head to beyond where the mean square fits into float16
_LARGEST_PRODUCT = 32752.0  # beyond it a product was seen to become infinite
_LARGEST_SLICE = 4094.0  # beyond it a slice off the start of an axis does, before A16


class HalfStorage(TorchDispatchMode):
    """Inside this block float32 tensors stand for float16 ones, see the module.

    `largest` has the largest magnitude that any operator gave, by operator; infinite where it overflowed.
    """

    def __init__(self, split_norms: bool = False) -> None:
        super().__init__()
        self.largest: dict[str, float] = {}
        self._inside = {_aten.bmm.default: _narrow_product, _aten.mm.default: _narrow_product}
        if split_norms:
            self._inside[_aten.native_layer_norm.default] = _split_layer_norm

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on rounded inputs and round what it gives."""
        results = half(self._inside.get(func, func)(*half(args), **(kwargs or {})))
        name = func.overloadpacket.__name__
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor) and result.is_floating_point() and result.numel():
                self.largest[name] = max(self.largest.get(name, 0.0), result.abs().max().item())
        return results


def half(value: Any) -> Any:
    """Float32 tensors as float16 would hold them, also in tuples and lists; anything else as it is."""
    if isinstance(value, Tensor):
        return value.half().float() if value.dtype == torch.float32 else value
    if isinstance(value, (tuple, list)):
        return type(value)(map(half, value))
    return value


def _narrow_product(left: Tensor, right: Tensor) -> Tensor:
    """[..., M, K] @ [..., K, N] with one float16 accumulator."""
    total = torch.zeros(*left.shape[:-1], right.shape[-1])
    for term in range(left.shape[-1]):
        total = half(total + half(left[..., term, None] * right[..., term, None, :]))
    return total


def _split_layer_norm(
    x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`native_layer_norm` over the last axis from single operators: only a mean's sum is wide."""
    mean = half(x.mean(-1, keepdim=True))
    centred = half(x - mean)
    variance = half(half(centred * centred).mean(-1, keepdim=True))
    scale = half(torch.rsqrt(half(variance + eps)))
    return half(half(half(centred * scale) * weight) + bias), mean, scale


def naive_rms(x: Tensor) -> Tensor:
    """x / rms(x) as it is written elsewhere."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)


def unscaled_rms(x: Tensor) -> Tensor:
    """x / rms(x) as a LayerNorm over [x, -x] alone, without the scale of `UnitRMS`."""
    both, size = torch.cat([x, -x], -1), x.shape[-1]
    return torch.nn.functional.layer_norm(
        both, (2 * size,), torch.ones(2 * size), torch.zeros(2 * size), _EPS
    )[..., :size]


def our_rms(x: Tensor) -> Tensor:
    """x / rms(x) as the chunks have it."""
    return UnitRMS(x.shape[-1], _EPS, torch.float32)(x)


def activations(size: int, rms: float, rows: int = 8) -> Tensor:
    """Rows [rows, size] as float16 holds them: normal, but for one value in 64 that is 12 times as large."""
    numbers = np.random.default_rng(size)
    values = numbers.normal(size=(rows, size))
    values[:, ::64] *= 12
    values *= rms / np.sqrt((values**2).mean(-1, keepdims=True))
    return half(torch.from_numpy(values.clip(-_LARGEST_HALF, _LARGEST_HALF).astype(np.float32)))


def norm_error(norm: Callable[[Tensor], Tensor], x: Tensor, split_norms: bool) -> float:
    """The largest relative error of any normed value of x [n, size] in emulated float16; infinite where one is lost."""
    with torch.no_grad(), HalfStorage(split_norms):
        found = norm(x).double()
    exact = x.double() / (x.double() ** 2).mean(-1, keepdim=True).add(_EPS).sqrt()
    error = ((found - exact).abs() / exact.abs().clamp_min(2.0**-10)).max().item()
    return error if np.isfinite(error) else np.inf


def gate_half_norms(verdict: Verdict) -> None:
    """Our norm is right at every size and magnitude, whatever becomes of the LayerNorm; the naive one is not."""
    large = activations(_SIZES[-1], _RMS[-1])
    controls = {
        "the naive RMSNorm": (naive_rms, False),
        "LayerNorm over [x, -x] without a scale, split": (unscaled_rms, True),
    }
    for name, (norm, split) in controls.items():
        lost = norm_error(norm, large, split) > 0.5
        verdict.check(f"{name} overflows where mean(x^2) > 65504", lost, "yes", "yes" if lost else "no")
    for form, bound in _NORM_BOUND.items():
        worst = max(
            (norm_error(our_rms, activations(size, rms), form == "split"), f"rms {rms:g}, size {size}")
            for size in _SIZES
            for rms in _RMS
        )
        verdict.at_most(f"relative error of a norm, LayerNorm as {form}", worst[0], bound, worst[1])


def gate_half_chain(
    verdict: Verdict, plan: ChunkPlan, weights: Weights, oracle: Oracle, arrays: Mapping[str, np.ndarray]
) -> None:
    """The chunks' own modules in emulated float16 choose the oracle's ids at all gated positions.

    `arrays` are those of a reference (`make_reference`); dialogues longer than the context are cut.
    """
    within = [
        dialogue
        for dialogue in oracle.with_numbers()
        if any(dialogue.position_of(place) < plan.context for place in dialogue.gated)
    ]
    if not within:
        verdict.check("gated ids within the context", False, "at least one", "none")
    for dialogue in within:
        storage, name = HalfStorage(split_norms=True), dialogue.name
        rows = emulated_rows(plan, weights, arrays[f"{name}.embeds"], arrays[f"{name}.ple"], storage)
        softcap = weights.config.final_logit_softcapping
        logits = project(weights.linear(HEAD_WEIGHT), {name: rows}, softcap)[0][name]
        gated = [place for place in dialogue.gated if dialogue.position_of(place) < len(rows)]
        expected = [dialogue.output_ids[place] for place in gated]
        found = logits[[dialogue.position_of(place) for place in gated]].argmax(1).tolist()
        verdict.check(f"{name}: ids in float16", found == expected, str(expected), str(found))
        products = max(storage.largest[operator] for operator in ("convolution", "bmm"))
        verdict.at_most(f"{name}: largest result of a product", products, _LARGEST_PRODUCT)
        verdict.at_most(f"{name}: largest value that is split off", storage.largest["split"], _LARGEST_SLICE)
        finite = all(np.isfinite(value) for value in storage.largest.values())
        verdict.check(f"{name}: nothing overflows", finite, "nothing", "nothing" if finite else "something")


def emulated_rows(
    plan: ChunkPlan, weights: Weights, embeds: np.ndarray, per_layer: np.ndarray, storage: HalfStorage
) -> np.ndarray:
    """Feed embeds [n, hidden] and per_layer [n, layers, ple_dim] to the chain; hidden rows [n, hidden] float32."""
    modules = torch_call(plan, weights)

    def call(number: int, inputs: Arrays) -> Arrays:
        with storage:
            return modules(number, inputs)

    host = ChunkHost(plan_json(plan, "fp32", [""] * len(plan.chunks)), call)
    count = min(plan.context, len(embeds))
    positions = track(range(count), "position", count)
    return np.stack([host.step(embeds[None, [p]], per_layer[None, [p]])[0, 0] for p in positions])


def torch_call(plan: ChunkPlan, weights: Weights) -> Call:
    """The chunks' modules in float32 torch, with the weights' values expanded."""
    modules = [
        AneChunk(weights, eager_convs(weights), torch.float32, chunk.layers, plan.context).eval()
        for chunk in plan.chunks
    ]

    @torch.no_grad()
    def call(number: int, inputs: Arrays) -> Arrays:
        chunk = plan.chunks[number]
        tensors = [torch.from_numpy(np.ascontiguousarray(inputs[name])) for name in chunk.inputs]
        outputs = modules[number](*tensors)
        return {name: value.numpy() for name, value in zip(chunk.outputs, outputs, strict=True)}

    return call
