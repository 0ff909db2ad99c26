"""Run a compiled kernel on numpy arrays, in a child process."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.msl.calls import KernelCall, Result
from workflow_scripts.msl.compiler import Compiled
from workflow_scripts.msl.faults import KernelFault, fault_from

Size = tuple[int, int, int]
_FILL = 0xFF  # what results hold before the run: NaN in every float type
_OTHER_FILL = 0x5A
_GROUPS_PER_PROCESS = 64  # fewer are not worth a process of their own
_COUNT_TIMEOUT = 120  # seconds
_THREADS = 1024  # Metal's limit per threadgroup
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0:atexit_sleep_ms=0",
}


def run_kernel(
    compiled: Compiled,
    arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray],
    grid: Size,
    threadgroup: Size,
    results: Sequence[Result],
    order: int = 0,
    timeout: int = 120,
    processes: int | None = None,
) -> list[np.ndarray]:
    """The kernel's results for `arguments` (in the order of its parameters), `grid` and `threadgroup` in threads.

    `order`: 0 runs lanes, SIMD-groups and threadgroups as numbered, 1 in reverse, 2 and up shuffled by that seed.
    Arrays that are np.memmap views are mapped from their own file. Threadgroups are dealt out to `processes`
    (default: as many as there are processors, where the grid is large enough). Every element of a result must have
    been written. Raises KernelFault for what the kernel does wrong, UserError for arguments it does not take.
    """
    _check_sizes(grid, threadgroup)
    arrays = _in_order(compiled, arguments, results)
    workers = processes or _processes(grid, threadgroup)
    settings = [f"order {order}", f"processes {workers}", f"timeout {timeout}"]
    settings += [f"grid {_words(grid)}", f"group {_words(threadgroup)}"]

    def filled(fill: int) -> list[np.ndarray]:
        return _run(compiled, settings, arrays, results, fill, timeout)[0]

    first = filled(_FILL)
    if any(_untouched(array, _FILL).any() for array in first):
        _check_written(compiled, results, first, filled(_OTHER_FILL))
    return first


def run_orders(
    compiled: Compiled,
    arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray],
    grid: Size,
    threadgroup: Size,
    results: Sequence[Result],
    orders: Iterable[int] = (0, 1, 2),
    timeout: int = 120,
) -> list[np.ndarray]:
    """The results, which must have equal bytes in all `orders`; KernelFault `wrong-order` otherwise."""
    first: list[np.ndarray] | None = None
    for order in orders:
        found = run_kernel(compiled, arguments, grid, threadgroup, results, order, timeout)
        first = first or found
        for result, one, other in zip(results, first, found, strict=True):
            _check_equal(compiled, result, one, other, order)
    return first or []


def run_call(
    compiled: Compiled, call: KernelCall, values: Mapping[str, np.ndarray], order: int = 0
) -> list[np.ndarray]:
    """A bundle's own call: its constants and dispatch, with `values` for the inputs that the graph computes."""
    arrays = call_arguments(call, values)
    return run_kernel(compiled, arrays, call.grid, call.threadgroup, call.results, order)


@dataclass(frozen=True)
class Uses:
    """How often a kernel used the elements of one tensor: all together, the least and the most used one."""

    total: int
    fewest: int
    most: int


@dataclass(frozen=True)
class Accesses:
    """What a kernel used: its tensors by name, and the bytes of its threadgroup memory."""

    tensors: dict[str, Uses]
    threadgroup_bytes: int


def count_accesses(compiled: Compiled, call: KernelCall, values: Mapping[str, np.ndarray]) -> Accesses:
    """Run a call of a kernel compiled in mode `count`, in one process. What a raw pointer reads is not counted.

    Raises ValueError for another mode, else as `run_kernel` does.
    """
    if compiled.mode != "count":
        raise ValueError(f"kernel {compiled.kernel} is compiled in mode {compiled.mode}: only `count` counts")
    _check_sizes(call.grid, call.threadgroup)
    arrays = _in_order(compiled, call_arguments(call, values), call.results)
    settings = [
        f"grid {_words(call.grid)}",
        f"group {_words(call.threadgroup)}",
        f"timeout {_COUNT_TIMEOUT}",
    ]
    _, report = _run(compiled, settings, arrays, call.results, _FILL, _COUNT_TIMEOUT)
    lines = [line.split("\t") for line in report.splitlines()]
    tensors = {line[1]: Uses(*map(int, line[2:])) for line in lines if line[0] == "MSL-COUNT"}
    return Accesses(tensors, next(int(line[1]) for line in lines if line[0] == "MSL-STORAGE"))


def call_arguments(call: KernelCall, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All arguments of a call by name. Raises UserError for values that are missing, unknown or of another type."""
    wanted = {argument.name for argument in call.arguments if argument.constant is None}
    if wanted != values.keys():
        raise UserError(f"kernel {call.name} takes the values {sorted(wanted)}, not {sorted(values)}")
    arrays = {}
    for argument in call.arguments:
        array = values[argument.name] if argument.constant is None else argument.constant
        if (array.dtype, array.shape) != (argument.dtype, argument.shape):
            raise UserError(
                f"kernel {call.name}: {argument.name} is {argument.dtype} {argument.shape}, "
                f"not {array.dtype} {array.shape}"
            )
        arrays[argument.name] = array
    return arrays


def _check_sizes(grid: Size, threadgroup: Size) -> None:
    if min(grid) < 1 or min(threadgroup) < 1 or prod(threadgroup) > _THREADS:
        raise UserError(
            f"grid {grid} with threadgroup {threadgroup} cannot be dispatched: sizes start at 1, and a threadgroup "
            f"has at most {_THREADS} threads"
        )


def _processes(grid: Size, threadgroup: Size) -> int:
    groups = prod(-(-size // group) for size, group in zip(grid, threadgroup, strict=True))
    return max(1, min(os.cpu_count() or 1, groups // _GROUPS_PER_PROCESS))


def _in_order(
    compiled: Compiled, arguments: Mapping[str, np.ndarray] | Sequence[np.ndarray], results: Sequence[Result]
) -> list[np.ndarray]:
    """The arguments in the order of the kernel's parameters."""
    names = compiled.buffers[: len(compiled.buffers) - len(results)]
    if isinstance(arguments, Mapping):
        if set(names) != arguments.keys():
            raise UserError(f"kernel {compiled.kernel} takes {sorted(names)}, not {sorted(arguments)}")
        return [arguments[name] for name in names]
    if len(arguments) != len(names):
        raise UserError(f"kernel {compiled.kernel} takes {len(names)} arguments, not {len(arguments)}")
    return list(arguments)


def _run(
    compiled: Compiled,
    settings: list[str],
    arrays: list[np.ndarray],
    results: Sequence[Result],
    fill: int,
    timeout: int,
) -> tuple[list[np.ndarray], str]:
    """One run whose results hold `fill` in every byte that the kernel does not write, and what it said on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        lines = list(settings)
        for name, array in zip(compiled.buffers, arrays, strict=False):
            path, offset = _stored(array, place / f"argument-{name}")
            lines.append(_buffer_line("argument", name, array.dtype, array.shape, offset, path))
        files = [place / f"result{number}" for number in range(len(results))]
        for result, path in zip(results, files, strict=True):
            path.write_bytes(bytes([fill]) * (prod(result.shape) * result.dtype.itemsize))
            lines.append(_buffer_line("result", result.name, result.dtype, result.shape, 0, path))
        plan = place / "plan"
        plan.write_text("\n".join(lines) + "\n", encoding="utf-8")
        report = _execute(compiled, [str(compiled.program), str(plan), *map(str, files)], timeout)
        found = [
            np.fromfile(path, result.dtype).reshape(result.shape)
            for result, path in zip(results, files, strict=True)
        ]
        return found, report


def _buffer_line(
    key: str, name: str, dtype: np.dtype, shape: tuple[int, ...], offset: int, path: Path
) -> str:
    numbers = [offset, prod(shape) * dtype.itemsize, len(shape), *shape]
    return f"{key} {name} {dtype.kind}{dtype.itemsize} {_words(numbers)} {path}"


def _words(numbers: Iterable[int]) -> str:
    return " ".join(str(number) for number in numbers)


def _stored(array: np.ndarray, path: Path) -> tuple[Path, int]:
    """(file, offset) of an array's bytes: its own file for a read-only view of a mapping, else `path`, written here."""
    if isinstance(array, np.memmap) and array.flags.c_contiguous and not array.flags.writeable:
        mapping = array
        while isinstance(mapping.base, np.memmap):
            mapping = mapping.base
        return Path(mapping.filename), mapping.offset + array.ctypes.data - mapping.ctypes.data
    np.ascontiguousarray(array).tofile(path)
    return path, 0


def _element_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8).reshape(array.size, array.itemsize)


def _untouched(array: np.ndarray, fill: int) -> np.ndarray:
    """Flat mask of the elements whose bytes are all `fill`."""
    return (_element_bytes(array) == fill).all(axis=1)


def _check_written(
    compiled: Compiled, results: Sequence[Result], first: list[np.ndarray], second: list[np.ndarray]
) -> None:
    """An element that follows the fill in both runs was never written; one that only looks like the fill was."""
    for result, one, other in zip(results, first, second, strict=True):
        missing = _untouched(one, _FILL) & _untouched(other, _OTHER_FILL)
        if missing.any():
            place = [int(index) for index in np.unravel_index(int(missing.argmax()), result.shape)]
            raise KernelFault(
                "uninitialised",
                compiled.kernel,
                f"{int(missing.sum())} of {missing.size} elements of {result.name} are never written, first {place}",
            )


def _check_equal(compiled: Compiled, result: Result, one: np.ndarray, other: np.ndarray, order: int) -> None:
    differs = (_element_bytes(one) != _element_bytes(other)).any(axis=1)
    if differs.any():
        place = [int(index) for index in np.unravel_index(int(differs.argmax()), result.shape)]
        raise KernelFault(
            "wrong-order",
            compiled.kernel,
            f"{int(differs.sum())} of {differs.size} elements of {result.name} are others in schedule {order} than in "
            f"schedule 0, first {place}",
        )


def _execute(compiled: Compiled, command: list[str], timeout: int) -> str:
    """Run the program and return what it said; in a session of its own, so that its workers end with it."""
    environment = os.environ | _OPTIONS
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        try:
            _, report = child.communicate(timeout=timeout + 10)  # the program itself watches the time
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise KernelFault("timeout", compiled.kernel, f"still running after {timeout} s") from None
    if child.returncode:
        raise fault_from(compiled.kernel, child.returncode, report.decode(errors="replace"))
    return report.decode(errors="replace")
