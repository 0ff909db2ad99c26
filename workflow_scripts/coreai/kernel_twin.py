"""A bundle with Metal kernels as a program that any host can run: its twin.

Only a Mac can run the kernels (measured on Linux: "Unresolved symbol: coreai.metal4_kernel"). The twin is the shipped
program itself with ordinary operators in the place of each kernel, over the very codes and codebook that the bundle
stores. They compute what `kernels/reference.py` defines: sums of float32 products, rounded once at the end. The
palettes that the program expands by itself are expanded here where they are small: the same values, once and not in
every call.
"""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from coreai.authoring import (
    AIModelAsset,
    AIProgram,
    Value,
    broadcasting_add,
    broadcasting_batch_matmul,
    broadcasting_equal,
    broadcasting_where,
    cast,
    concat,
    lut_to_dense,
    reduce_max,
    reduce_min,
    reshape,
    transpose,
)

from workflow_scripts.coreai import private
from workflow_scripts.coreai.bytecode import Constant
from workflow_scripts.coreai.host_copy import axes, constants_of, element, saved_copy, stored_bytes
from workflow_scripts.errors import UserError
from workflow_scripts.kernels.packing import GROUP_ROWS, WORD_BITS, unpack
from workflow_scripts.kernels.partials import TILE_ROWS

_INDICES = {"ui4": 4, "ui8": 8}  # element type of a palette's indices -> their bits
_ENTRIES = {"f16": np.float16, "f32": np.float32}  # element type of its codebook
_NARROWEST = 4  # bits of the narrowest code
# Weights that are expanded at a time: 128 MiB of float32, and as much for its transpose. A head of 262144 x 1536 at
# once takes the process to 3.2 GB of anonymous memory, in blocks to 0.42 GB (measured).
_BLOCK = 1 << 25
# Up to so many weights in all kernels and palettes of a bundle, they are expanded once and not in every call: a third
# of the time of a call of the embedded model (measured: 0.06 s against 0.16 s). E2B's MLPs would take 6.2 GB.
_EXPANDED_ONCE = 1 << 26
_COUNTED_NAME = re.compile(r"(.+)_[a-z]{8}")  # conversion appends eight letters to a kernel's own name


@dataclass(frozen=True)
class Twin:
    """A program without Metal kernels, the names of those that it had, one for each call, and the bytes it grew by."""

    program: AIProgram
    kernels: list[str]
    growth: int


@dataclass(frozen=True, eq=False)
class _Packed:
    """A matrix as the bundle stores it: `codes` uint8 [N, K * bits / 8], `codebook` float16 [N / 32, 2**bits]."""

    bits: int
    codes: np.ndarray
    codebook: np.ndarray


def build_twin(bundle: Path) -> Twin:
    """The twin of a bundle; codes stay in its mapped main.mlirb. A damaged program aborts the process.

    Raises UserError naming a kernel for which there is no reference, or which is not called as its reference is.
    """
    program = AIModelAsset.load(bundle).program
    kernels: list[str] = []
    operations = private.kernel_operations(program)
    if not operations:
        return Twin(program, kernels, 0)
    weights = sum(map(_codes_at_most, operations))
    weights += sum(math.prod(axes(indices)) for indices, _ in private.look_ups(program))
    small = weights <= _EXPANDED_ONCE
    expand, growth = (_expanded_once, 4 * weights) if small else (_expanded_in_each_call, 0)
    path = bundle / "main.mlirb"
    stored = constants_of(path)

    def build(kernel: private.KernelOperation, inputs: list[Value]) -> list[Value]:
        name, bits, reference = _reference_of(bundle, kernel.name)
        _check_call(bundle, name, bits, inputs)
        kernels.append(name)
        words, codebook = (stored_bytes(path, stored, value) for value in kernel.inputs[1:])
        rows, entries = inputs[1].type.shape[0], 1 << bits
        matrix = _Packed(bits, words.reshape(rows, -1), codebook.view(np.float16).reshape(-1, entries))
        return reference(_scores(inputs[0], matrix, expand), inputs[0].type.dtype)

    private.replace_kernels(program, build)
    if small:
        private.replace_look_ups(program, partial(_looked_up, path, stored))
    return Twin(program, kernels, growth)


def saved_twin(twin: Twin, bundle: Path) -> AbstractContextManager[Path]:
    """A temporary folder with the twin of `bundle`, see `saved_copy`."""
    why = "has Metal kernels, so this host runs a temporary copy without them"
    return saved_copy(twin.program, bundle, twin.growth, why)


def _palette_matvec(scores: Value, dtype: np.dtype) -> list[Value]:
    """Scores float32 [1, 1, N] -> the same in x's type."""
    return [cast(scores, dtype)]


def _head_argmax(scores: Value, dtype: np.dtype) -> list[Value]:
    """Scores float32 [1, 1, N] -> per tile of 8 rows the largest, float32 [N / 8], and its row, int32 [N / 8].

    The lowest of equal rows is the smallest place that holds the maximum: argmax does not promise it.
    """
    rows = scores.type.shape[2]
    tiles = reshape(scores, _shape(rows // TILE_ROWS, TILE_ROWS))
    per_tile, axis = _shape(rows // TILE_ROWS), np.array([1], np.int32)
    largest = reduce_max(tiles, axis)
    places, nowhere = np.arange(TILE_ROWS, dtype=np.int32), np.array(TILE_ROWS, np.int32)
    place = reduce_min(broadcasting_where(broadcasting_equal(tiles, largest), places, nowhere), axis)
    first_rows = np.arange(0, rows, TILE_ROWS, dtype=np.int32)
    return [reshape(largest, per_tile), broadcasting_add(reshape(place, per_tile), first_rows)]


def _scores(x: Value, matrix: _Packed, expand: "_Expand") -> Value:
    """W x in float32, [1, 1, N], block by block of rows."""
    x = cast(x, np.float32)
    block = max(_BLOCK // x.type.shape[2] // GROUP_ROWS, 1)
    groups = [
        slice(start, min(start + block, len(matrix.codebook)))
        for start in range(0, len(matrix.codebook), block)
    ]
    parts = [broadcasting_batch_matmul(x, expand(matrix, part)) for part in groups]
    return parts[0] if len(parts) == 1 else concat(np.array(2, np.int32), parts)


def _expanded_in_each_call(matrix: _Packed, groups: slice) -> Value:
    """Weights float32 [K, rows] of some palette groups, by the operators of the plain export of a palette."""
    codes = matrix.codes[_rows(groups)]
    shape = (len(codes), codes.shape[1] * 8 // matrix.bits)
    constant = private.packed_constant(codes.reshape(-1), shape, matrix.bits)
    codebook = matrix.codebook[groups].astype(np.float32)[:, None, :, None]
    weight = lut_to_dense(constant, codebook, np.array(0, np.int16))
    return transpose(weight, np.array([1, 0], np.uint32))


def _expanded_once(matrix: _Packed, groups: slice) -> np.ndarray:
    """The same weights as a constant of the twin."""
    codes = unpack(np.ascontiguousarray(matrix.codes[_rows(groups)]).view(np.int32), matrix.bits)
    entries = matrix.codebook[groups].astype(np.float32).repeat(GROUP_ROWS, axis=0)
    return np.ascontiguousarray(np.take_along_axis(entries, codes.astype(np.int64), axis=1).T)


def _looked_up(
    path: Path, stored: dict[str, Constant], indices: private.KernelValue, codebook: private.KernelValue
) -> np.ndarray | None:
    """The values of a palette in a plain export; None where it has another form, or indices in the program's text.

    Indices are [N, ...], the codebook is [groups, 1, ..., entries, 1] with N / groups rows to a group.
    """
    bits, dtype = _INDICES.get(element(indices)), _ENTRIES.get(element(codebook))
    shape, (groups, *blocks, entries, vector) = axes(indices), axes(codebook)
    columns = math.prod(shape[1:])
    by_rows = shape[0] % groups == 0 and {vector, *blocks} == {1}
    if not (indices.resource and bits and dtype and by_rows) or columns * bits % WORD_BITS:
        return None
    words = stored_bytes(path, stored, indices).reshape(shape[0], -1)
    book = stored_bytes(path, stored, codebook).view(dtype).reshape(groups, entries)
    codes = unpack(np.ascontiguousarray(words).view(np.int32), bits)
    rows = book.repeat(shape[0] // groups, axis=0)
    return np.take_along_axis(rows, codes.astype(np.int64), axis=1).reshape(shape)


def _rows(groups: slice) -> slice:
    return slice(groups.start * GROUP_ROWS, groups.stop * GROUP_ROWS)


def _codes_at_most(kernel: private.KernelOperation) -> int:
    """Codes in a kernel's words, taking the narrowest."""
    return math.prod(axes(kernel.inputs[1])) * WORD_BITS // _NARROWEST


def _shape(*axes: int) -> np.ndarray:
    return np.array(axes, np.uint32)


_Expand = Callable[[_Packed, slice], Value | np.ndarray]
_Reference = Callable[[Value, np.dtype], list[Value]]
_REFERENCES: dict[str, tuple[int, _Reference]] = {
    "palette_matvec_int8": (8, _palette_matvec),
    "palette_matvec_int4": (4, _palette_matvec),
    "head_argmax_int8": (8, _head_argmax),
    "head_argmax_int4": (4, _head_argmax),
}
"""Kernel -> width of its codes in bits, and what it makes of the scores."""


def _reference_of(bundle: Path, counted_name: str) -> tuple[str, int, _Reference]:
    counted = _COUNTED_NAME.fullmatch(counted_name)
    name = counted[1] if counted else counted_name
    if name not in _REFERENCES:
        raise UserError(
            f"{bundle.name} calls the Metal kernel {name}, which this host cannot run and for which there is no "
            f"reference (there is one for {', '.join(_REFERENCES)}): run it on a Mac, or add the reference to "
            "workflow_scripts/coreai/kernel_twin.py"
        )
    return (name, *_REFERENCES[name])


def _check_call(bundle: Path, name: str, bits: int, inputs: list[Value]) -> None:
    """A kernel of the same name from another version may take something else."""
    found, wanted = [str(value.type) for value in inputs], None
    if inputs[0].type.rank == 3 and inputs[-1].type.rank == 2:
        columns, groups = inputs[0].type.shape[2], inputs[-1].type.shape[0]
        wanted = [
            f"tensor<1x1x{columns}x{inputs[0].type.dtype}>",
            f"tensor<{groups * GROUP_ROWS}x{columns * bits // WORD_BITS}xsi32>",
            f"tensor<{groups}x{1 << bits}xf16>",
        ]
    if found != wanted:
        raise UserError(
            f"{bundle.name} calls the Metal kernel {name} on {', '.join(found)}, but its reference takes x [1, 1, K], "
            f"words int32 [N, K * {bits} / {WORD_BITS}] and codebook float16 [N / {GROUP_ROWS}, {1 << bits}]: "
            "build it again"
        )
