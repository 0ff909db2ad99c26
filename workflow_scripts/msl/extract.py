"""The Metal kernels of a finished bundle, with everything that is needed to run them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from coreai.authoring.asset import AIModelAsset

from workflow_scripts.coreai import private
from workflow_scripts.coreai.bytecode import Constant, read_constants
from workflow_scripts.errors import UserError
from workflow_scripts.msl.signature import buffer_names

_DTYPES = {
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i1": np.dtype(np.bool_),
    **{
        f"{'u' if kind == 'u' else 's'}i{bits}": np.dtype(f"{kind}{bits // 8}")
        for kind in "iu"
        for bits in (8, 16, 32, 64)
    },
}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)[,>]")


@dataclass(frozen=True, eq=False)
class Argument:
    """One input of a kernel; axes in torch's order. `constant` is None for a value that the graph computes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    constant: np.ndarray | None


@dataclass(frozen=True)
class Result:
    """One output of a kernel; axes in torch's order."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of a kernel in a bundle: its source as shipped, its inputs and outputs, its dispatch in threads."""

    function: str
    name: str
    source: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def extract(bundle: Path) -> list[KernelCall]:
    """Every call of a Metal kernel, in program order. Large constants are views of the mapped main.mlirb.

    A damaged program aborts the process that loads it: see `coreai.isolated`. Raises UserError for a folder that is
    no bundle and for a constant or dtype that cannot be read.
    """
    path = bundle / "main.mlirb"
    if not path.is_file():
        raise UserError(f"{bundle} is no .aimodel folder: it has no main.mlirb")
    stored = {constant.name: constant for constant in read_constants(path)}
    program = AIModelAsset.load(bundle).program
    return [_call(path, stored, operation) for operation in private.kernel_operations(program)]


def distinct(calls: Sequence[KernelCall]) -> list[list[KernelCall]]:
    """Calls grouped by what they execute: source but for the kernel's counted name, shapes, dtypes and dispatch."""
    groups: dict[tuple, list[KernelCall]] = {}
    for call in calls:
        shapes = tuple((value.dtype.str, value.shape) for value in (*call.arguments, *call.results))
        key = (call.source.replace(call.name, "KERNEL"), shapes, call.grid, call.threadgroup)
        groups.setdefault(key, []).append(call)
    return list(groups.values())


def _call(path: Path, stored: dict[str, Constant], operation: private.KernelOperation) -> KernelCall:
    names = buffer_names(operation.source, operation.name)
    count = len(operation.inputs)
    if len(names) != count + len(operation.result_types):
        raise UserError(
            f"{path.parent.name}: kernel {operation.name} declares {len(names)} buffers, but the program gives it "
            f"{count} arguments and {len(operation.result_types)} results"
        )
    arguments = tuple(
        _argument(path, stored, name, value)
        for name, value in zip(names[:count], operation.inputs, strict=True)
    )
    results = tuple(
        Result(name, *_tensor_type(text, name))
        for name, text in zip(names[count:], operation.result_types, strict=True)
    )
    return KernelCall(
        operation.graph,
        operation.name,
        operation.source,
        arguments,
        results,
        operation.grid,
        operation.threadgroup,
    )


def _argument(path: Path, stored: dict[str, Constant], name: str, value: private.KernelValue) -> Argument:
    dtype, shape = _tensor_type(value.type_text, name)
    if value.resource is not None:
        return Argument(name, dtype, shape, _mapped(path, stored.get(value.resource), dtype, shape))
    if value.elements is None:
        return Argument(name, dtype, shape, None)
    return Argument(name, dtype, shape, np.broadcast_to(value.elements.astype(dtype, copy=False), shape))


def _tensor_type(text: str, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """(dtype, shape) from the text of an MLIR tensor type with static axes."""
    found = _TENSOR.match(text)
    if not found or found[2] not in _DTYPES:
        raise UserError(f"buffer {name} of a Metal kernel has the type {text}, which cannot be run")
    return _DTYPES[found[2]], tuple(int(axis) for axis in found[1].split("x") if axis)


def _mapped(path: Path, place: Constant | None, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if place is None or place.size != size:
        raise UserError(f"{path} is damaged: it lacks a constant of {size} bytes that a Metal kernel takes")
    return np.memmap(path, dtype, "r", place.offset, shape)
