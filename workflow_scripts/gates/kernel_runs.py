"""A bundle's Metal kernel run on the CPU, as shipped, and judged against exact results.

Runs: with the bundle's own weights and an input of mixed magnitudes, whole; with codes and codebooks at the ends of
their ranges; heads also where scores are equal. All this is done optimized, in three orders of lanes, SIMD-groups and
threadgroups that must give equal bytes. The first palette groups are run again under sanitizers for addresses and for
data races.

Bound: scores are sums of K products in float32 in any order, compared with the float64 sum over the artifact's own
codes. Each term meets at most K roundings of 2**-24, which gives K * 2**-24 of the sum of the terms' sizes for sure,
and 6 * sqrt(K) * 2**-24 as a probabilistic bound (Higham and Mary 2019, "A new approach to probabilistic rounding
error analysis", with lambda = 6); the smaller one counts. A float16 result is rounded once more: 2**-11 of it, or
2**-25 where it is subnormal.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.kernels.matrices import GROUP_ROWS
from workflow_scripts.kernels.packing import pack
from workflow_scripts.kernels.partials import TILE_ROWS, chosen_token
from workflow_scripts.msl.calls import KernelCall
from workflow_scripts.msl.compiler import MODES, compile_kernel
from workflow_scripts.msl.faults import KernelFault
from workflow_scripts.msl.run import run_orders
from workflow_scripts.quantize.weights import Palette

_ORDERS = (0, 1, 2)
_SLICE_GROUPS = 3  # palette groups that the sanitizers see; every further one runs the same code
_LARGEST = 65504.0  # of float16
_SMALLEST = 2.0**-24
# A score is a sum of random signs, so about |weight| * |x|: it stays far below what float16 can hold.
_SCORE = 4096.0
_SIGMAS = 6.0


@dataclass(frozen=True)
class Harness:
    """Where programs are compiled to, and the modes that a kernel is run in (see `msl.compiler`)."""

    folder: Path
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True)
class Subject:
    """A call to run: its kernel's name, the matrix as the artifact stores it, and rows per SIMD-group.

    `line` is the number of lines in the call's source before the text of the kernel's file.
    """

    call: KernelCall
    kernel: str
    palette: Palette
    rows: int
    line: int

    @property
    def is_head(self) -> bool:
        """Whether the results are maxima of tiles with their rows, not the scores."""
        return len(self.call.results) == 2


@dataclass(frozen=True)
class Case:
    """One run: x [K] in the compute type, a matrix, its words and codebook as the kernel gets them.

    `chosen` are the rows that a head must choose where scores are equal by construction.
    """

    name: str
    x: np.ndarray
    palette: Palette
    words: np.ndarray
    codebook: np.ndarray
    chosen: list[int] | None = None


def run_subject(verdict: Verdict, subject: Subject, harness: Harness) -> None:
    """Every case in every mode of the harness."""
    own = _own_weights(subject)
    for mode in harness.modes:
        fast = mode == "fast"
        rows = min(_SLICE_GROUPS * GROUP_ROWS, len(own.words))
        cases = [own, *_edges(subject)] if fast else [_first_rows(own, rows), next(_edges(subject))]
        for case in cases:
            _run(verdict, subject, case, mode, harness.folder, _ORDERS if fast else _ORDERS[:1])


def _run(
    verdict: Verdict, subject: Subject, case: Case, mode: str, folder: Path, orders: tuple[int, ...]
) -> None:
    call, rows = subject.call, len(case.words)
    label = f"{subject.kernel} {list(subject.palette.indices.shape)}, {case.name}, {mode}"
    arrays = (case.x[None, None], case.words, case.codebook)
    whole = len(subject.palette.indices)
    # The kernels find their rows by their threadgroup's number, so a grid of fewer groups computes the first rows.
    results = [
        replace(result, shape=(*result.shape[:-1], result.shape[-1] * rows // whole))
        for result in call.results
    ]
    grid = (call.grid[0], rows // subject.rows, 1)
    try:
        program = compile_kernel(call.source, call.name, mode, folder)
        outputs = run_orders(program, arrays, grid, call.threadgroup, results, orders)
    except KernelFault as fault:
        verdict.check(label, False, "no fault", f"{fault}{_in_file(subject, fault)}")
        return
    if subject.is_head:
        _judge_head(verdict, label, case, *outputs)
    else:
        _judge_scores(verdict, label, case, outputs[0].reshape(-1))


def _in_file(subject: Subject, fault: KernelFault) -> str:
    """The fault's lines as they are counted in the kernel's own file."""
    places = [f"{subject.kernel}.metal:{line - subject.line}" for line in fault.lines if line > subject.line]
    return f" [{', '.join(places)}]" if places else ""


def _judge_scores(verdict: Verdict, label: str, case: Case, found: np.ndarray) -> None:
    """All scores [N] within the bound."""
    exact, allowed = _exact(case)
    if case.x.dtype == np.float16:
        allowed = allowed + 2.0**-11 * (np.abs(exact) + allowed) + 2.0**-25
    _check_error(verdict, label, found, exact, allowed)


def _judge_head(verdict: Verdict, label: str, case: Case, values: np.ndarray, indices: np.ndarray) -> None:
    """Tiles' maxima within the bound, each with a row of its tile that holds it; equal ones by their lowest row."""
    exact, allowed = (scores.reshape(-1, TILE_ROWS) for scores in _exact(case))
    largest, slack = exact.max(axis=1), allowed.max(axis=1)
    _check_error(verdict, label, values, largest, slack)
    tiles = np.arange(len(exact))
    places = indices - tiles * TILE_ROWS
    inside = (places >= 0) & (places < TILE_ROWS)
    chosen = exact[tiles, np.where(inside, places, 0)]
    wrong = np.flatnonzero(~(inside & (chosen >= largest - 2 * slack)))
    if case.chosen is not None and not wrong.size:
        wrong = np.flatnonzero(indices != case.chosen)
    best = tiles * TILE_ROWS + exact.argmax(axis=1) if case.chosen is None else np.array(case.chosen)
    text = "the lowest row of the largest score"
    first = f"row {indices[wrong[0]]} for {best[wrong[0]]} in tile {wrong[0]}" if wrong.size else text
    verdict.check(f"{label}: rows", not wrong.size, text, first)
    if case.chosen is not None and len(set(largest)) == 1:
        token = chosen_token(values, indices)
        verdict.check(f"{label}: token", token == case.chosen[0], str(case.chosen[0]), str(token))


def _check_error(
    verdict: Verdict, label: str, found: np.ndarray, exact: np.ndarray, allowed: np.ndarray
) -> None:
    """The largest error as a share of what is allowed at its place; NaN is larger than any."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(found.astype(np.float64) - exact)
        share = np.where(error == 0, 0.0, error / allowed)
    place = int(np.argmax(share))
    where = f"result {place}, {found[place]:.6g} for {exact[place]:.6g}"
    verdict.at_most(f"{label}: error / bound", float(share[place]), 1.0, where)


def _exact(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Scores W x and the errors allowed to a float32 sum, float64 [N] each, a block of rows at a time."""
    shape = case.palette.indices.shape
    x = case.x.astype(np.float64)
    scores, sizes = np.empty(shape[0]), np.empty(shape[0])
    for block in row_blocks(shape):
        weights = case.palette.dequantize(block).astype(np.float64)
        scores[block] = weights @ x
        sizes[block] = np.abs(weights, out=weights) @ np.abs(x)
    return scores, sum_error(shape[1]) * sizes


def sum_error(terms: int) -> float:
    """Bound of the error of a float32 dot product of so many terms, relative to the sum of the terms' sizes."""
    return min(terms, _SIGMAS * math.sqrt(terms)) * 2.0**-24


def _own_weights(subject: Subject) -> Case:
    words, codebook = (argument.constant for argument in subject.call.arguments[1:])
    x = _mixed(subject, float(np.abs(codebook).max()))
    return Case("own weights", x, subject.palette, words, codebook)


def _first_rows(case: Case, rows: int) -> Case:
    groups = rows // GROUP_ROWS
    palette = replace(
        case.palette, indices=case.palette.indices[:rows], codebook=case.palette.codebook[:groups]
    )
    return replace(
        case,
        name=f"{rows} rows of {case.name}",
        palette=palette,
        words=case.words[:rows],
        codebook=case.codebook[:groups],
    )


def _edges(subject: Subject) -> Iterator[Case]:
    """Codes and codebooks at the ends of their ranges; for heads, equal scores."""
    numbers, bits = np.random.default_rng(1), subject.palette.bits
    columns, entries, rows = subject.palette.indices.shape[1], 1 << bits, 2 * GROUP_ROWS
    book = np.sort(numbers.normal(0, 0.1, (2, entries)).astype(np.float16), axis=1)
    yield _made("highest codes", subject, np.full((rows, columns), entries - 1), book)
    yield _made("codes 0", subject, np.zeros((rows, columns)), book)
    ends = np.array([-_LARGEST, -_SMALLEST, 0.0, _SMALLEST, 1.0, _LARGEST], np.float16)
    codes = numbers.integers(0, entries, (rows, columns))
    yield _made("extreme codebook", subject, codes, np.sort(numbers.choice(ends, (2, entries)), axis=1))
    if subject.is_head:
        yield _equal_rows(subject, numbers)
        yield _equal_pairs(subject, numbers)


def _equal_rows(subject: Subject, numbers: np.random.Generator) -> Case:
    """All rows of a tile are equal: the first one is chosen."""
    columns, entries, tiles = subject.palette.indices.shape[1], 1 << subject.palette.bits, 8
    codes = numbers.integers(0, entries, (tiles, columns)).repeat(TILE_ROWS, axis=0)
    book = np.sort(numbers.normal(0, 0.1, (tiles * TILE_ROWS // GROUP_ROWS, entries)).astype(np.float16), 1)
    chosen = [tile * TILE_ROWS for tile in range(tiles)]
    return _made("equal rows", subject, codes, book, chosen=chosen)


def _equal_pairs(subject: Subject, numbers: np.random.Generator) -> Case:
    """One tile per pair of its rows, which share the largest score: a wrong comparison may go well in most pairs.

    A score is the entry of the row's first code. All tiles have the same maximum, so they are equal among each other.
    """
    pairs = list(itertools.combinations(range(TILE_ROWS), 2))[::-1]
    columns, entries = subject.palette.indices.shape[1], 1 << subject.palette.bits
    codes = numbers.integers(0, entries - 1, (len(pairs) * TILE_ROWS, columns))
    for tile, pair in enumerate(pairs):
        codes[[tile * TILE_ROWS + place for place in pair], 0] = entries - 1
    book = np.linspace(-1, 1, entries, dtype=np.float16)[None].repeat(len(codes) // GROUP_ROWS, axis=0)
    x = np.zeros(columns, _x_dtype(subject))
    x[0] = 1
    chosen = [tile * TILE_ROWS + pair[0] for tile, pair in enumerate(pairs)]
    return _made("equal pairs", subject, codes, book, x, chosen)


def _made(
    name: str,
    subject: Subject,
    codes: np.ndarray,
    book: np.ndarray,
    x: np.ndarray | None = None,
    chosen: list[int] | None = None,
) -> Case:
    bits = subject.palette.bits
    palette = Palette(codes.astype(np.uint8), book, GROUP_ROWS, bits)
    given = _mixed(subject, float(np.abs(book).max())) if x is None else x
    return Case(name, given, palette, pack(palette.indices, bits), book, chosen)


def _mixed(subject: Subject, largest: float) -> np.ndarray:
    """An input [K] of mixed magnitudes, for weights of up to `largest`.

    A sum in half would lose the small terms among the large ones.
    """
    numbers, columns = np.random.default_rng(0), subject.palette.indices.shape[1]
    x = numbers.normal(0, 1, columns) * numbers.choice([2.0**-6, 1.0, 8.0], columns)
    size = max(largest, _SMALLEST) * float(np.linalg.norm(x))
    return (x * min(1.0, 2.0 ** math.floor(math.log2(_SCORE / size)))).astype(_x_dtype(subject))


def _x_dtype(subject: Subject) -> np.dtype:
    return subject.call.arguments[0].dtype
