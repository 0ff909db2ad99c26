"""The one module that touches private names of coreai-core and coreai-torch: reproducible programs and files.

Stock conversion gives other bytes in every process (measured): constants of 256 elements and more are named by a
random number, lowered composites and Metal kernels by `secrets.choice`, externalized modules by `uuid4`; and
`save_asset` stamps the time, and copies all weights twice. Here constants are named by their
content and stay memory-mapped until they are written, and the other names count up from zero for every program.
"""

import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Iterator, Sequence
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
from coreai._compiler.ir import DenseResourceElementsAttr  # noqa: E402
from coreai.authoring import AIProgram  # noqa: E402
from coreai.authoring.asset import _COREAI_PRODUCER as PRODUCER  # noqa: E402

_stock_elements = _bindings.dialects.coreai.create_elements_attr


def _named_by_content(location: Any, tensor_type: Any, array: np.ndarray) -> Any:
    """A constant whose resource name is the sha256 of its bytes, over the array's own memory."""
    array = np.ascontiguousarray(array)
    flat = array.reshape(-1)
    if array.size < _INLINE_LIMIT or ((flat[:4096] == flat[0]).all() and (flat == flat[0]).all()):
        return _stock_elements(location, tensor_type, array)
    data = flat.view(np.uint8)
    name = "w_" + hashlib.sha256(data).hexdigest()[:32]
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
    _bindings.dialects.coreai.create_elements_attr = _named_by_content
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


@dataclass(frozen=True, eq=False)
class KernelValue:
    """A value that goes into a Metal kernel: the text of its MLIR type, and where a constant's elements are.

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
        return [
            _kernel_operation(graph, operation)
            for graph, operation in _operations(module.operation, "")
            if operation.name == "coreai.metal4_kernel"
        ]


def _operations(parent: Any, graph: str) -> Iterator[tuple[str, Any]]:
    """(name of the graph around it, operation) for everything inside of `parent`."""
    for block in (block for region in parent.regions for block in region.blocks):
        for entry in block.operations:
            operation = entry.operation
            yield graph, operation
            named = operation.name == "coreai.graph"
            yield from _operations(operation, operation.attributes["sym_name"].value if named else graph)


def _kernel_operation(graph: str, operation: Any) -> KernelOperation:
    # Operands: inputs, threads_per_grid, threads_per_thread_group, result shapes.
    count = operation.attributes["operandSegmentSizes"][0]
    values = [_kernel_value(operation.operands[index]) for index in range(count + 2)]
    grid, threadgroup = (tuple(int(size) for size in value.elements) for value in values[count:])
    return KernelOperation(
        graph,
        operation.attributes["kernel_name"].value,
        operation.attributes["kernel_source"].value,
        values[:count],
        [str(result.type) for result in operation.results],
        grid,
        threadgroup,
    )


def _kernel_value(value: Any) -> KernelValue:
    type_text, source = str(value.type), value.owner
    while getattr(source, "name", "") == "coreaix.copy_with_constraints":  # to a buffer that the GPU sees
        source = source.operands[0].owner
    if getattr(source, "name", "") != "coreai.constant":
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
