"""The Metal kernels of a finished bundle, with everything that is needed to run them."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError
from workflow_scripts.msl.calls import Argument, KernelCall, Result
from workflow_scripts.msl.signature import buffer_names

if TYPE_CHECKING:
    from workflow_scripts.coreai import private

_PROGRAM = "main.mlirb"
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


def extract(bundle: Path) -> list[KernelCall]:
    """Every call of a Metal kernel, in program order. Large constants are views of the mapped main.mlirb.

    The program is loaded in a child process, which a damaged one aborts. Raises ChildDied then, and UserError for a
    folder that is no bundle and for a constant or dtype that cannot be read.
    """
    if not (bundle / _PROGRAM).is_file():
        raise UserError(f"{bundle} is no .aimodel folder: it has no {_PROGRAM}")
    return read_calls(bundle, isolated(describe, bundle=str(bundle)))


def read_calls(bundle: Path, described: dict[str, np.ndarray]) -> list[KernelCall]:
    """The calls of a bundle from what `describe` says of it; raises UserError as `extract` does."""
    path = bundle / _PROGRAM
    return [
        _call(path, record, described, number)
        for number, record in enumerate(json.loads(described["calls"].tobytes()))
    ]


def describe(bundle: str) -> dict[str, np.ndarray]:
    """To be run by `isolated`: what a bundle's kernel calls are.

    `calls` is a JSON text in bytes; `CALL.INPUT` holds the elements of a constant that is no blob of the file.
    """
    from coreai.authoring.asset import AIModelAsset

    from workflow_scripts.coreai import private

    stored = {constant.name: constant for constant in read_constants(Path(bundle) / _PROGRAM)}
    operations = private.kernel_operations(AIModelAsset.load(Path(bundle)).program)
    records, elements = [], {}
    for number, operation in enumerate(operations):
        inputs = []
        for index, value in enumerate(operation.inputs):
            blob = stored.get(value.resource or "")
            # A resource that is not there has no bytes: what reads the record says so.
            place = [blob.offset, blob.size] if blob else [0, 0] if value.resource is not None else None
            inputs.append({"type": value.type_text, "place": place})
            if value.elements is not None:
                elements[f"{number}.{index}"] = value.elements
        records.append(_record(operation, inputs))
    return {"calls": np.frombuffer(json.dumps(records).encode(), np.uint8), **elements}


def _record(operation: "private.KernelOperation", inputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "function": operation.graph,
        "name": operation.name,
        "source": operation.source,
        "inputs": inputs,
        "results": operation.result_types,
        "grid": operation.grid,
        "threadgroup": operation.threadgroup,
    }


def _call(path: Path, record: dict[str, Any], described: dict[str, np.ndarray], number: int) -> KernelCall:
    kernel, inputs, results = record["name"], record["inputs"], record["results"]
    names = buffer_names(record["source"], kernel)
    count = len(inputs)
    if len(names) != count + len(results):
        raise UserError(
            f"{path.parent.name}: kernel {kernel} declares {len(names)} buffers, but the program gives it "
            f"{count} arguments and {len(results)} results"
        )
    arguments = tuple(
        _argument(path, name, value["type"], value["place"], described.get(f"{number}.{index}"))
        for index, (name, value) in enumerate(zip(names[:count], inputs, strict=True))
    )
    return KernelCall(
        record["function"],
        kernel,
        record["source"],
        arguments,
        tuple(
            Result(name, *_tensor_type(text, name)) for name, text in zip(names[count:], results, strict=True)
        ),
        tuple(record["grid"]),
        tuple(record["threadgroup"]),
    )


def _argument(
    path: Path, name: str, type_text: str, place: list[int] | None, elements: np.ndarray | None
) -> Argument:
    """`place` is (offset, size) of a constant's blob, `elements` are those of another constant."""
    dtype, shape = _tensor_type(type_text, name)
    if place is not None:
        return Argument(name, dtype, shape, _mapped(path, place, dtype, shape))
    if elements is None:
        return Argument(name, dtype, shape, None)
    return Argument(name, dtype, shape, np.broadcast_to(elements.astype(dtype, copy=False), shape))


def _tensor_type(text: str, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """(dtype, shape) from the text of an MLIR tensor type with static axes."""
    found = _TENSOR.match(text)
    if not found or found[2] not in _DTYPES:
        raise UserError(f"buffer {name} of a Metal kernel has the type {text}, which cannot be run")
    return _DTYPES[found[2]], tuple(int(axis) for axis in found[1].split("x") if axis)


def _mapped(path: Path, place: list[int], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    offset, found = place
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if found != size:
        raise UserError(f"{path} is damaged: it lacks a constant of {size} bytes that a Metal kernel takes")
    return np.memmap(path, dtype, "r", offset, shape)
