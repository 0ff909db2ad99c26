"""Gate `kernels`: the Metal kernels of a finished bundle are ours, read the right weights, and compute what they must.

No GPU is needed: the calls are read back from the bundle, compared with the weights artifact byte by byte, and run on
the CPU as shipped (`kernel_runs`). That Apple's compiler accepts the source is the gate `gpu`'s to see.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.gates.kernel_runs import Harness, Subject, run_subject
from workflow_scripts.gates.kernel_source import check_sources, text_line
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.kernels.matrices import GROUP_ROWS, kernel_matrix
from workflow_scripts.kernels.packing import WORD_BITS, pack
from workflow_scripts.kernels.partials import TILE_ROWS
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.msl.calls import KernelCall, distinct
from workflow_scripts.msl.extract import extract
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Palette, Weights

_LANES = 32
_BITS = 8  # what a matrix that is no palette is said to need
_AS_NEEDED = "as the form needs"
_Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """How a graph form uses its kernel: one call per matrix, in this order, a SIMD-group for so many of its rows."""

    kernel: str
    matrices: Callable[[TextConfig], list[str]]
    rows: int
    results: Callable[[int, str], list[_Tensor]]  # of N rows, in a compute type


def _mlp_matrices(config: TextConfig) -> list[str]:
    names = ("gate_proj", "up_proj", "down_proj")
    return [
        f"layers.{layer}.mlp.{name}.weight" for layer in range(config.num_hidden_layers) for name in names
    ]


FORMS = {
    "hostcache_metal": Form("palette_matvec", _mlp_matrices, 4, lambda rows, dtype: [(dtype, (1, 1, rows))]),
    "head_argmax_metal": Form(
        "head_argmax",
        lambda config: [HEAD_WEIGHT],
        TILE_ROWS,
        lambda rows, dtype: [("float32", (rows // TILE_ROWS,)), ("int32", (rows // TILE_ROWS,))],
    ),
}


@dataclass(frozen=True)
class Claim:
    """What a kernel bundle is said to be; `sources` maps every kernel of ours to the text of its .metal file."""

    form: str
    compute: str
    weights: Weights
    sources: Mapping[str, str]


@dataclass(frozen=True)
class Expected:
    """One call as the form needs it."""

    matrix: str
    kernel: str
    palette: Palette
    interface: str


def gate_kernels(verdict: Verdict, bundle: Path, claim: Claim, harness: Harness) -> None:
    """All checks over the kernel calls of a bundle."""
    gate_calls(verdict, extract(bundle), claim, harness)


def gate_calls(verdict: Verdict, calls: Sequence[KernelCall], claim: Claim, harness: Harness) -> None:
    """All checks; what the calls compute is looked at only where they are the right calls."""
    form, expected = _form(claim.form), expected_calls(claim)
    if not check_calls(verdict, calls, expected, claim.sources):
        return
    wanted = dict(zip(map(id, calls), expected, strict=True))
    groups = distinct(calls)
    for group in track(groups, "kernel calls that differ", len(groups)):
        call, its = group[0], wanted[id(group[0])]
        line = text_line(call, claim.sources[its.kernel])
        run_subject(verdict, Subject(call, its.kernel, its.palette, form.rows, line), harness)


def _form(name: str) -> Form:
    if name not in FORMS:
        raise UserError(
            f"the graph form `{name}` calls no Metal kernels: those that do are {', '.join(FORMS)}"
        )
    return FORMS[name]


def expected_calls(claim: Claim) -> list[Expected]:
    """The calls that the form needs. Raises UserError for a matrix that no kernel can take."""
    form, dtype = _form(claim.form), COMPUTE_DTYPES[claim.compute]
    calls = []
    for name in form.matrices(claim.weights.config):
        stored = claim.weights.linear(name)
        palette = kernel_matrix(claim.weights, name, stored.bits if isinstance(stored, Palette) else _BITS)
        rows, columns = palette.indices.shape
        arguments = [
            (dtype, (1, 1, columns)),
            ("int32", (rows, columns * palette.bits // WORD_BITS)),
            ("float16", (rows // GROUP_ROWS, 1 << palette.bits)),
        ]
        results = form.results(rows, dtype)
        grid, threadgroup = (_LANES, rows // form.rows, 1), (_LANES, GROUP_ROWS // form.rows, 1)
        interface = _interface("main", arguments, results, grid, threadgroup)
        calls.append(Expected(name, f"{form.kernel}_int{palette.bits}", palette, interface))
    return calls


def check_calls(
    verdict: Verdict, calls: Sequence[KernelCall], expected: Sequence[Expected], sources: Mapping[str, str]
) -> bool:
    """As many calls as the form needs, each of our kernel with the right types, dispatch and matrix."""
    before = len(verdict.checks)
    verdict.check("calls of Metal kernels", len(calls) == len(expected), str(len(expected)), str(len(calls)))
    if len(calls) != len(expected):
        return False
    check_sources(verdict, calls, [its.kernel for its in expected], sources)
    pairs = list(zip(calls, expected, strict=True))
    _check_all(verdict, "types, shapes and dispatch", pairs, _wrong_interface)
    if all(check.passed for check in verdict.checks[before:]):
        _check_all(
            verdict, "words and codebooks", pairs, lambda call, its: _wrong_matrix(call, its, expected)
        )
    return all(check.passed for check in verdict.checks[before:])


def _check_all(
    verdict: Verdict,
    name: str,
    pairs: Sequence[tuple[KernelCall, Expected]],
    problem: Callable[[KernelCall, Expected], str | None],
) -> None:
    """One check over all calls; the first problem is told."""
    for number, (call, its) in enumerate(track(pairs, name, len(pairs))):
        found = problem(call, its)
        if found:
            verdict.check(name, False, _AS_NEEDED, f"call {number} ({its.matrix}): {found}")
            return
    verdict.check(name, True, _AS_NEEDED, _AS_NEEDED)


def _wrong_interface(call: KernelCall, its: Expected) -> str | None:
    arguments, results = (
        [(value.dtype.name, value.shape) for value in values] for values in (call.arguments, call.results)
    )
    found = _interface(call.function, arguments, results, call.grid, call.threadgroup)
    if found != its.interface:
        return f"{found} in place of {its.interface}"
    given = [argument.name for argument in call.arguments if argument.constant is None]
    if given != [call.arguments[0].name]:
        return f"the graph computes {', '.join(given) or 'no argument'} in place of {call.arguments[0].name}"
    return None


def _interface(
    function: str,
    arguments: Sequence[_Tensor],
    results: Sequence[_Tensor],
    grid: tuple[int, ...],
    threadgroup: tuple[int, ...],
) -> str:
    def text(tensors: Sequence[_Tensor]) -> str:
        return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in tensors)

    dispatch = f"{list(grid)} threads in groups of {list(threadgroup)}"
    return f"{function}: {text(arguments)} -> {text(results)}, {dispatch}"


def _wrong_matrix(call: KernelCall, its: Expected, expected: Sequence[Expected]) -> str | None:
    words, codebook = (argument.constant for argument in call.arguments[1:])
    row = _first_other_row(words, its.palette)
    if row is not None:
        holders = [other.matrix for other in expected if _holds(words, other.palette)]
        return f"it reads {holders[0]}" if holders else f"the words of row {row} are others"
    groups = np.flatnonzero((codebook != its.palette.codebook).any(axis=1))
    return f"the codebook of palette group {groups[0]} is another" if groups.size else None


def _holds(words: np.ndarray, palette: Palette) -> bool:
    same_shape = words.shape == (len(palette.indices), palette.indices.shape[1] * palette.bits // WORD_BITS)
    return same_shape and _first_other_row(words, palette) is None


def _first_other_row(words: np.ndarray, palette: Palette) -> int | None:
    """The first row whose words are not the packed codes, block by block: a head has 400 MB."""
    for block in row_blocks(palette.indices.shape):
        same = (words[block] == pack(palette.indices[block], palette.bits)).all(axis=1)
        if not same.all():
            return block.start + int(np.argmin(same))
    return None
