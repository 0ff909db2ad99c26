"""The one module that touches private names of coreai-core and coreai-torch: reproducible files, programs from inside.

Stock conversion gives other bytes in every process (measured): constants of 256 elements and more are named by a
random number, lowered composites and Metal kernels by `secrets.choice`, externalized modules by `uuid4`; and
`save_asset` stamps the time, and copies all weights twice. Here constants are named by their
content and stay memory-mapped until they are written, and the other names count up from zero for every program.
"""

import hashlib
import importlib.metadata
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError

_CHECKED = {"coreai-core": "1.0.0b3", "coreai-torch": "0.4.3"}
_CREATED = "20260101T000000Z"  # the format wants a date; the same one in every build
_INLINE_LIMIT = 256  # elements; stock conversion keeps smaller constants and splats inside the program's text


def _check_versions() -> None:
    for name, version in _CHECKED.items():
        found = importlib.metadata.version(name)
        if found != version:
            raise UserError(
                f"{name} {found} is installed, but reproducible saving was checked with {version} only: "
                "install the pins with `make environment`, or check workflow_scripts/coreai/private.py anew"
            )


_check_versions()

import coreai._compiler._mlir_libs._coreaiIR._bindings.mlir as _bindings  # noqa: E402
import coreai.authoring.func as _func  # noqa: E402
import coreai.authoring.graph_builder as _graph_builder  # noqa: E402
import coreai.authoring.metal as _metal  # noqa: E402
import numpy as np  # noqa: E402
from coreai._compiler.dialects.coreai import ConstantOp  # noqa: E402
from coreai._compiler.ir import (  # noqa: E402
    DenseResourceElementsAttr,
    InsertionPoint,
    IntegerType,
    RankedTensorType,
)
from coreai.authoring import AIProgram, Value  # noqa: E402
from coreai.authoring.asset import _COREAI_PRODUCER as PRODUCER  # noqa: E402

_stock_elements = _bindings.dialects.coreai.create_elements_attr


class _NamedByContent:
    """Makes constants whose resource name is the sha256 of their bytes, over the arrays' own memory.

    What is equal in bytes and type is one constant: a second one of its name would get another, `w_..._1`, and which of
    the two stays when equal constants are merged differs (measured: the steps of an embedding and its tied head).
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Any] = {}

    def __call__(self, location: Any, tensor_type: Any, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        flat = array.reshape(-1)
        if array.size < _INLINE_LIMIT or ((flat[:4096] == flat[0]).all() and (flat == flat[0]).all()):
            return _stock_elements(location, tensor_type, array)
        data = flat.view(np.uint8)
        key = "w_" + hashlib.sha256(data).hexdigest()[:32], str(tensor_type)
        if key not in self._made:
            self._made[key] = _elements_over(data, key[0], tensor_type)
        return self._made[key]


def _elements_over(data: np.ndarray, name: str, tensor_type: Any) -> Any:
    # With an alignment above 16 the asset's summary() comes back empty, by chance (measured).
    return DenseResourceElementsAttr.get_from_buffer(data, name, tensor_type, alignment=16)


class _CountingChoice:
    """Stands in for `secrets.choice`, called once per letter of an 8-letter name: names count up in base 26."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, letters: str) -> str:
        name, position = divmod(self._calls, 8)
        self._calls += 1
        return letters[name // len(letters) ** (7 - position) % len(letters)]


class _CountingUuid:
    """Stands in for `uuid4`, of which the first 8 hex digits are used."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> uuid.UUID:
        self._calls += 1
        return uuid.UUID(int=self._calls << 96)


@contextmanager
def reproducible_names() -> Iterator[None]:
    """Inside this block one program may be converted; its names depend on nothing but the program."""
    import coreai_torch.externalize as externalize

    modules = (_graph_builder, _func, _metal)
    stock_choices, stock_uuid = [module.choice for module in modules], externalize.uuid4
    _bindings.dialects.coreai.create_elements_attr = _NamedByContent()
    for module in modules:
        module.choice = _CountingChoice()
    externalize.uuid4 = _CountingUuid()
    try:
        yield
    finally:
        _bindings.dialects.coreai.create_elements_attr = _stock_elements
        for module, choice in zip(modules, stock_choices, strict=True):
            module.choice = choice
        externalize.uuid4 = stock_uuid


Pack = Callable[[Any, int], Any]
"""Tensor int8 or uint8 of codes, their bits -> tensor uint8 [bytes]."""


@contextmanager
def packing_by(stand_in: Callable[[Pack], Pack]) -> Iterator[None]:
    """Inside this block codes below 8 bits are packed by what `stand_in` makes of the converter's own functions."""
    import coreai_torch._compression._intx as _intx

    stock = _intx.pack_intx, _intx.pack_uintx
    _intx.pack_intx, _intx.pack_uintx = map(stand_in, stock)
    try:
        yield
    finally:
        _intx.pack_intx, _intx.pack_uintx = stock


def forget_kernel_names(kernels: Sequence[Any]) -> None:
    """Let kernels take new names: a TorchMetalKernel keeps the counted name of its first conversion otherwise."""
    for kernel in kernels:
        kernel.kernel_cache.clear()
        kernel._scalar_kernel_caches.clear()


def write_asset(program: AIProgram, out: Path, description: dict[str, str]) -> None:
    """Write main.mlirb, main.hash (raw sha256 of main.mlirb) and metadata.json into the folder `out`.

    `description` goes into the metadata's `creatorDefinedMetadata`.
    """
    program._save_bytecode(out / "main.mlirb")
    with (out / "main.mlirb").open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").digest()
    (out / "main.hash").write_bytes(digest)
    metadata = {
        "assetVersion": "2.0",
        "creationDate": _CREATED,
        "creatorDefinedMetadata": description,
        "producer": PRODUCER,  # readers take an asset without it for one of coreai-torch 0.4.0, which is unreadable
    }
    (out / "metadata.json").write_text(
        json.dumps(metadata, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def mlir_module(program: AIProgram) -> Any:
    """The program's MLIR module, for reading."""
    return program._module._mlir_module


_KERNEL = "coreai.metal4_kernel"
_TO_GPU, _FROM_GPU = "coreaix.copy_with_constraints", "coreaix.copy_discarding_constraints"
_CONSTANT = "coreai.constant"
_LOOK_UP = "coreai.lut_to_dense"
_BLOCKS = "coreai.blockwise_shift_scale"
_ZERO = re.compile(r"dense<-?0(?:\.0+(?:e\+00)?)?>")


@dataclass(frozen=True, eq=False)
class KernelValue:
    """What goes into a Metal kernel, a look-up or block codes: its MLIR type's text, and where its elements are.

    Large constants have the name of a resource of main.mlirb, small and uniform ones their elements, others neither.
    """

    type_text: str
    resource: str | None
    elements: np.ndarray | None


@dataclass(frozen=True, eq=False)
class KernelOperation:
    """One `coreai.metal4_kernel`: the graph it is in, its attributes, inputs, types of results, dispatch in threads."""

    graph: str
    name: str
    source: str
    inputs: list[KernelValue]
    result_types: list[str]
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]


def kernel_operations(program: AIProgram) -> list[KernelOperation]:
    """Every Metal kernel of the program, in its order."""
    module = mlir_module(program)
    with module.context:
        return [_kernel_operation(graph, operation) for graph, operation in _kernels(module)]


def replace_kernels(
    program: AIProgram, build: Callable[[KernelOperation, list[Value]], Sequence[Value]]
) -> None:
    """Put operators in the place of every Metal kernel, in program order.

    `build` gets a kernel and its inputs as they are before they are copied to the GPU. It makes the operators with the
    functions of `coreai.authoring`, and returns a value for each result, of the result's type.
    """
    module = mlir_module(program)
    with module.context:
        for graph, operation in _kernels(module):
            inputs = [Value._from_mlir(_on_host(value)) for value in _kernel_inputs(operation)]
            with InsertionPoint(operation), operation.location:
                values = build(_kernel_operation(graph, operation), inputs)
            for result, value in zip(operation.results, values, strict=True):
                _take_place(result, value._to_mlir())
            operation.erase()
        _erase_unused(module)
        module.operation.verify()


def look_ups(program: AIProgram) -> list[tuple[KernelValue, KernelValue]]:
    """Indices and codebook of every palette that the program expands by itself, in its order."""
    module = mlir_module(program)
    with module.context:
        return [_looked_up(operation) for _, operation in _named(module, _LOOK_UP)]


def replace_look_ups(
    program: AIProgram, expand: Callable[[KernelValue, KernelValue], np.ndarray | None]
) -> None:
    """Put constants in the place of palettes that the program expands in every call.

    `expand` gets a palette's indices and codebook, and returns the elements of the result, or None to leave it.
    """
    _replace_by_constants(mlir_module(program), _LOOK_UP, lambda operation: expand(*_looked_up(operation)))


def replace_block_codes(
    program: AIProgram, expand: Callable[[KernelValue, KernelValue], np.ndarray | None]
) -> None:
    """Put constants in the place of block codes that the program multiplies by their steps in every call.

    `expand` gets the codes and the steps, and returns the elements of the result, or None to leave it. Codes with an
    offset or a bias, which no recipe has, are left.
    """

    def elements(operation: Any) -> np.ndarray | None:
        codes, steps, *others = operation.operands
        if not all(_ZERO.match(str(other.owner.attributes["value"])[:40]) for other in others):
            return None
        return expand(_kernel_value(codes), _kernel_value(steps))

    _replace_by_constants(mlir_module(program), _BLOCKS, elements)


def _replace_by_constants(module: Any, name: str, elements: Callable[[Any], np.ndarray | None]) -> None:
    """Put a constant in the place of each operation of a name for which there are elements."""
    with module.context:
        for _, operation in _named(module, name):
            expanded = elements(operation)
            if expanded is None:
                continue
            (result,) = operation.results
            with InsertionPoint(operation), operation.location:
                data = np.ascontiguousarray(expanded).reshape(-1).view(np.uint8)
                constant = ConstantOp(value=_elements_over(data, "expanded", result.type)).result
            result.replace_all_uses_with(constant)
            operation.erase()
        _erase_unused(module)
        module.operation.verify()


def _looked_up(operation: Any) -> tuple[KernelValue, KernelValue]:
    return _kernel_value(operation.operands[0]), _kernel_value(operation.operands[1])


def packed_constant(data: np.ndarray, shape: tuple[int, ...], bits: int) -> Value:
    """A new constant of unsigned integers of `bits` bits, for use inside of `replace_kernels`.

    `data` uint8, flat, is their packed form, the lowest bits first; it is not copied before the program is written.
    Its name is counted, not made from its content: the program is not for keeping.
    """
    tensor_type = RankedTensorType.get(shape, IntegerType.get_unsigned(bits))
    return Value._from_mlir(ConstantOp(value=_elements_over(data, "packed", tensor_type)).result)


def _take_place(result: Any, value: Any) -> None:
    """Let `value` stand for a kernel's result and for its copies from the GPU."""
    users = [use.owner.operation for use in result.uses]
    result.replace_all_uses_with(value)
    for user in users:
        if user.name == _FROM_GPU:
            user.results[0].replace_all_uses_with(value)
            user.erase()


def _erase_unused(module: Any) -> None:
    """Erase the copies and constants that nothing reads: the file would keep them."""
    passive = [entry for _, entry in _operations(module.operation, "") if entry.name in (_TO_GPU, _CONSTANT)]
    for operation in reversed(passive):
        if not any(True for _ in operation.results[0].uses):
            operation.erase()


def _kernels(module: Any) -> list[tuple[str, Any]]:
    return _named(module, _KERNEL)


def _named(module: Any, name: str) -> list[tuple[str, Any]]:
    return [found for found in _operations(module.operation, "") if found[1].name == name]


def _operations(parent: Any, graph: str) -> Iterator[tuple[str, Any]]:
    """(name of the graph around it, operation) for everything inside of `parent`."""
    for block in (block for region in parent.regions for block in region.blocks):
        for entry in block.operations:
            operation = entry.operation
            yield graph, operation
            named = operation.name == "coreai.graph"
            yield from _operations(operation, operation.attributes["sym_name"].value if named else graph)


def _kernel_operation(graph: str, operation: Any) -> KernelOperation:
    inputs = _kernel_inputs(operation)
    dispatch = [_kernel_value(operation.operands[len(inputs) + index]) for index in range(2)]
    grid, threadgroup = (tuple(int(size) for size in value.elements) for value in dispatch)
    return KernelOperation(
        graph,
        operation.attributes["kernel_name"].value,
        operation.attributes["kernel_source"].value,
        [_kernel_value(value) for value in inputs],
        [str(result.type) for result in operation.results],
        grid,
        threadgroup,
    )


def _kernel_inputs(operation: Any) -> list[Any]:
    """The operands are: inputs, threads_per_grid, threads_per_thread_group, result shapes."""
    return [operation.operands[index] for index in range(operation.attributes["operandSegmentSizes"][0])]


def _on_host(value: Any) -> Any:
    """The value behind copies to a buffer that the GPU sees."""
    while getattr(value.owner, "name", "") == _TO_GPU:  # the owner of a graph's argument is a block
        value = value.owner.operands[0]
    return value


def _kernel_value(value: Any) -> KernelValue:
    type_text, source = str(value.type), _on_host(value).owner
    if getattr(source, "name", "") != _CONSTANT:
        return KernelValue(type_text, None, None)
    constant = source.attributes["value"]
    reference = (
        str(constant)[:200] if type(constant).__name__ == "Attribute" else ""
    )  # never the elements' text
    if reference.startswith("dense_resource<"):
        return KernelValue(
            type_text, reference[len("dense_resource<") : reference.index(">")].strip('"'), None
        )
    return KernelValue(type_text, None, np.array(constant))
