"""Hold a finished bundle's program against the checked list of the Neural Engine (`ane_rules`)."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.coreai.ane_rules import COMPOSITES, DTYPES, LIMITS, OPERATORS, PATTERNS, Limit, Rule
from workflow_scripts.coreai.isolated import isolated

_VIEWS = {"reshape", "transpose", "slice", "split", "expand_dims", "shrink_dims", "cast"}
_EDGE = {"reshape", "cast"}
_UNPACKING = {"lut_to_dense", "blockwise_shift_scale"}
_SMALL = 256  # elements of a constant that stands in the program's text
_COMPOSITE = re.compile(r'composite_declaration<"([^"]+)"')


def ane_problems(bundle: Path) -> list[str]:
    """What in a bundle breaks a rule: function, what, why, who says so, how often. Empty where nothing does.

    The program is read in a child process, since a damaged one ends the process that loads it: ChildDied then.
    """
    return isolated(find_problems, bundle=str(bundle))["problems"].tolist()


def find_problems(bundle: str) -> dict[str, np.ndarray]:
    """The child's side of `ane_problems`."""
    from coreai.authoring.asset import AIModelAsset

    from workflow_scripts.coreai.private import mlir_module

    program = AIModelAsset.load(Path(bundle)).program
    module = mlir_module(program)
    with module.context:
        graphs = [entry for entry in module.body if entry.operation.name == "coreai.graph"]
        found = Counter(problem for graph in graphs for problem in _graph_problems(graph))
    lines = [text if count == 1 else f"{text} ({count} times)" for text, count in found.items()]
    return {"problems": np.array(lines, dtype=str)}


def _graph_problems(graph: Any) -> Iterator[str]:
    name = graph.attributes["sym_name"].value
    if "composite_decl" in graph.attributes:
        composite = _COMPOSITE.search(str(graph.attributes["composite_decl"]))[1]
        yield from _judged(f"{name}: composite {composite}", COMPOSITES.get(composite))
        return
    body = graph.regions[0].blocks[0]
    for problem in _Body(body).problems():
        yield f"{name}: {problem}"


class _Body:
    """The operators of one graph."""

    def __init__(self, block: Any) -> None:
        self._arguments = list(block.arguments)
        self._operations = [entry.operation for entry in block]
        self._tail = self._integer_tail()

    def problems(self) -> Iterator[str]:
        for argument in self._arguments:
            yield from _shape_problems("input", argument.type)
        for operation in self._operations:
            name = _short(operation.name)
            if name == "constant":
                yield from _constant_problems(operation)
                continue
            yield from _judged(name, OPERATORS.get(name))
            for result in operation.results:
                yield from _shape_problems(name, result.type)
                yield from self._dtype_problems(operation, result)
            yield from self._pattern_problems(name, operation)

    def _dtype_problems(self, operation: Any, result: Any) -> Iterator[str]:
        dtype = str(result.type.element_type)
        rule = DTYPES.get(dtype)
        if (rule is not None and rule.allowed) or self._at_edge(operation):
            return
        pattern = "cast inside" if dtype.startswith(("f", "bf")) else "integer inside"
        yield from _judged(f"{pattern}: {_short(operation.name)} gives {dtype}", PATTERNS[pattern])

    def _at_edge(self, operation: Any) -> bool:
        """Between an input and its first float16 value, or between the last one and outputs."""
        if operation in self._tail:
            return True
        if _short(operation.name) not in _EDGE:
            return False
        return self._is_input(operation.operands[0], _EDGE) or all(
            _short(use.owner.name) == "output" for use in operation.results[0].uses
        )

    def _integer_tail(self) -> list[Any]:
        """Operators that give integers, of which nothing but outputs comes."""
        tail: list[Any] = []
        for operation in reversed(self._operations):
            if _short(operation.name) in ("output", "constant"):
                continue
            users = [use.owner.operation for result in operation.results for use in result.uses]
            integers = all(not str(r.type.element_type).startswith(("f", "bf")) for r in operation.results)
            if integers and all(_short(user.name) == "output" or user in tail for user in users):
                tail.append(operation)
        return tail

    def _pattern_problems(self, name: str, operation: Any) -> Iterator[str]:
        if name == "batch_matmul" and any(_is_stored(value) for value in operation.operands):
            yield from _judged("matmul by stored weights", PATTERNS["matmul by stored weights"])
        if name == "concat":
            values = list(operation.operands)[1:]  # the first is the axis
            if sum(self._is_input(value, _VIEWS) for value in values) > 1:
                yield from _judged("concat of inputs", PATTERNS["concat of inputs"])
        if name == "argmax":
            axis = int(np.array(operation.operands[1].owner.attributes["value"]).reshape(()))
            yield from _limited("argmax axis", operation.operands[0].type.shape[axis])

    def _is_input(self, value: Any, through: set[str]) -> bool:
        """Whether a value is an input of the graph, seen through some operators."""
        while value not in self._arguments:
            if _short(value.owner.name) not in through:
                return False
            value = value.owner.operands[0]
        return True


def _short(name: str) -> str:
    """`coreai.decomposable.broadcasting_add` -> `add`."""
    return name.rpartition(".")[2].removeprefix("broadcasting_")


def _is_stored(value: Any) -> bool:
    """Whether a value is a constant, as it is, unpacked, or in another shape."""
    owner = value.owner
    while hasattr(owner, "operands") and _short(owner.name) in _VIEWS | _UNPACKING:
        owner = owner.operands[0].owner
    return getattr(owner, "name", "") == "coreai.constant"


def _constant_problems(operation: Any) -> Iterator[str]:
    tensor = operation.results[0].type
    dtype = str(tensor.element_type)
    if not all(_short(use.owner.name) in _UNPACKING for use in operation.results[0].uses):
        # A codebook has an axis per axis of its matrix and two more; it is unpacked before the engine sees it.
        yield from _shape_problems("constant", tensor)
    if dtype in ("f32", "f64", "bf16"):
        yield from _judged(f"constant of {dtype}", PATTERNS["constant in float32"])
    if dtype == "f16" and int(np.prod(tensor.shape)) < _SMALL and not _finite(operation.attributes["value"]):
        yield from _judged("infinite constant", PATTERNS["infinite constant"])


def _finite(elements: Any) -> bool:
    return bool(np.isfinite(np.array(elements).astype(np.float64)).all())


def _shape_problems(where: str, tensor: Any) -> Iterator[str]:
    if not tensor.has_static_shape:
        yield from _judged(f"{where}: dynamic shape", PATTERNS["dynamic shape"])
        return
    shape = list(tensor.shape)
    yield from _limited("rank", len(shape), f"{where} {shape}: ")
    yield from _limited("width or height", max(shape[-2:], default=1), f"{where} {shape}: ")
    yield from _limited("axis", max(shape, default=1), f"{where} {shape}: ")


def _judged(what: str, rule: Rule | None) -> Iterator[str]:
    if rule is None:
        yield f"{what} is not on the checked list: find out about it, and add it to coreai/ane_rules.py"
    elif not rule.allowed:
        yield f"{what}: {rule.reason} [{', '.join(rule.sources)}]"


def _limited(name: str, size: int, where: str = "") -> Iterator[str]:
    limit: Limit = LIMITS[name]
    if size > limit.largest:
        sources = ", ".join(limit.sources)
        yield f"{where}{name} of {size}, at most {limit.largest}: {limit.reason} [{sources}]"
