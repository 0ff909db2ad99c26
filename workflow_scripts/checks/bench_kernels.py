"""Part of `make bench`: what each Metal kernel reads, at the real model's row lengths, counted as its source runs.

A token's time on a GPU goes into reading weights, so a kernel is as fast as it reads little and in order.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from workflow_scripts.checks.measure import quiet
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.kernels import (
    head_argmax_int4,
    head_argmax_int8,
    palette_matvec_int4,
    palette_matvec_int8,
)
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec, PackedMatrix
from workflow_scripts.kernels.packing import GROUP_ROWS, WORD_BITS
from workflow_scripts.kernels.partials import TILE_ROWS
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.msl.calls import KernelCall
from workflow_scripts.msl.compiler import compile_kernel
from workflow_scripts.msl.extract import describe, read_calls
from workflow_scripts.msl.registers import moving_indices
from workflow_scripts.msl.run import Accesses, count_accesses

Layer = KernelMatvec | KernelHead

LIMIT = 32 << 10
"""Bytes of threadgroup memory that a threadgroup may take on every GPU (Metal feature set tables)."""
_ROWS = 4 * GROUP_ROWS
_LANES = 32
_INPUT = "X"
_MATVEC_COLUMNS = (1536, 6144, 12288)  # E2B: hidden size, and both sizes of its MLPs
_HEAD_COLUMNS = (1536,)
_MATVECS = (palette_matvec_int8, palette_matvec_int4)
_HEADS = (head_argmax_int8, head_argmax_int4)
_HEADER = (
    f"{'kernel':<20}{'K':>6}{'bytes/output':>14}{'least':>7}{'ratio':>7}{'each word':>11}{'x from':>8}"
    f"{'threads':>9}{'threadgroup bytes':>19}{'moving indices':>16}"
)
_LEGEND = """\
bytes/output: read of W, codebook and x, per row of W; least: W and codebook once, x once in each SIMD-group
each word: how often a word of W is read; x from: bytes of it per output; threadgroup bytes: of Metal's limit
moving indices: uses of a local array whose index is no compile-time constant, which keep it out of registers"""


@dataclass(frozen=True)
class Counted:
    """A call of a kernel and what it used of its tensors."""

    call: KernelCall
    accesses: Accesses

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an argument, axes in torch's order: W has N rows, x has K columns."""
        return next(argument.shape for argument in self.call.arguments if argument.name == name)

    def reads(self) -> dict[str, int]:
        """Bytes read of each argument."""
        return {
            argument.name: self.accesses.tensors[argument.name].total * argument.dtype.itemsize
            for argument in self.call.arguments
        }

    def least(self) -> dict[str, int]:
        """Bytes that the design needs of each argument: weights and codebook once, x once in each SIMD-group."""
        simd_groups = prod(self.call.grid) // _LANES
        return {
            argument.name: prod(argument.shape)
            * argument.dtype.itemsize
            * (simd_groups if argument.name == _INPUT else 1)
            for argument in self.call.arguments
        }


def print_table() -> None:
    """One line for each kernel and row length."""
    layers = _real_layers()
    with tempfile.TemporaryDirectory(prefix="bench-kernels-") as home:
        calls = shipped_calls(layers, Path(home))
        print(_HEADER)
        for layer, call in zip(layers, calls, strict=True):
            print(_line(layer.kernel.name, count(call, Path(home))), flush=True)
    print(_LEGEND)


def shipped_calls(layers: Sequence[Layer], home: Path) -> list[KernelCall]:
    """The layers' kernel calls as a bundle ships them: one for each layer, in order, read back from one in `home`."""
    bundle = home / "kernels.aimodel"
    bundle.mkdir()
    kernels = {layer.kernel.name: layer.kernel for layer in layers}
    with quiet():
        save_bundle([_function(layers)], bundle, {}, list(kernels.values()))
        # In this process: the bundle was just written, nothing can have damaged it.
        return read_calls(bundle, describe(str(bundle)))


def count(call: KernelCall, home: Path) -> Counted:
    """What a call uses for one input, and its program in the folder `home`. Raises as `compile_kernel` does."""
    program = compile_kernel(call.source, call.name, "count", home)
    x = next(argument for argument in call.arguments if argument.name == _INPUT)
    return Counted(call, count_accesses(program, call, {_INPUT: np.ones(x.shape, x.dtype)}))


def plain_matrix(bits: int, columns: int, rows: int = _ROWS) -> PackedMatrix:
    """A matrix whose codes are nearly all 0: what a kernel reads does not depend on them."""
    words = torch.zeros((rows, columns * bits // WORD_BITS), dtype=torch.int32)
    # Not uniform, else they would stand in the program's text and not among its constants.
    words[0, 0] = 1
    codebook = torch.linspace(-1, 1, (rows // GROUP_ROWS) << bits, dtype=torch.float16)
    return PackedMatrix(words, codebook.reshape(rows // GROUP_ROWS, 1 << bits))


def _real_layers() -> list[Layer]:
    return [
        layer(binding.KERNEL, plain_matrix(binding.BITS, columns))
        for bindings, layer, lengths in (
            (_MATVECS, KernelMatvec, _MATVEC_COLUMNS),
            (_HEADS, KernelHead, _HEAD_COLUMNS),
        )
        for binding in bindings
        for columns in lengths
    ]


class _SideBySide(torch.nn.Module):
    """Layers with an input each. One graph: tracing four takes more than twice as long (measured)."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The layers' outputs, one after the other."""
        found = [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]
        return tuple(y for value in found for y in ((value,) if torch.is_tensor(value) else value))


def _function(layers: Sequence[Layer]) -> Function:
    """All layers as one function, in float16."""
    inputs, outputs = {}, {}
    for number, layer in enumerate(layers):
        rows, words = layer.words.shape
        bits = layer.codebook.shape[1].bit_length() - 1
        inputs[f"x{number}"] = TensorSpec("float16", (1, 1, words * WORD_BITS // bits))
        if isinstance(layer, KernelMatvec):
            outputs[f"y{number}"] = TensorSpec("float16", (1, 1, rows))
        else:
            outputs[f"values{number}"] = TensorSpec("float32", (rows // TILE_ROWS,))
            outputs[f"indices{number}"] = TensorSpec("int32", (rows // TILE_ROWS,))
    return Function("main", _SideBySide(layers), FunctionSpec(inputs, outputs))


def _line(name: str, counted: Counted) -> str:
    call, accesses = counted.call, counted.accesses
    reads, least = counted.reads(), counted.least()
    words = accesses.tensors["W"]
    each = str(words.most) if words.fewest == words.most else f"{words.fewest} to {words.most}"
    memory = f"{accesses.threadgroup_bytes} of {LIMIT}"
    rows, columns = counted.shape("W")[0], counted.shape(_INPUT)[-1]
    return (
        f"{name:<20}{columns:>6}{sum(reads.values()) / rows:>14.0f}"
        f"{sum(least.values()) / rows:>7.0f}{sum(reads.values()) / sum(least.values()):>7.2f}{each:>11}"
        f"{reads[_INPUT] / rows:>8.0f}{prod(call.threadgroup):>9}{memory:>19}"
        f"{len(moving_indices(call.source, call.name)):>16}"
    )
