"""Part of `make bench`: a step of the runtime that gate `numbers` runs bundles with, beside torch on the same codes.

torch does the same work, which is why it is the measure: in each step it expands every matrix to float32 and
multiplies, on one thread as the runtime. What a step costs is the runtime's doing, so it is shown and not demanded;
demanded is that memory stays small beside the mapped bundle, which decides whether a host can run the gates at all.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workflow_scripts.checks.bench_palettes import MATRICES, SHAPE, draw_palettes, map_palettes
from workflow_scripts.checks.bench_save import saved_by
from workflow_scripts.checks.measure import all_reached, least_seconds, memory_columns
from workflow_scripts.checks.memory import peak_anonymous
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError

_ROUNDS = 2
_MOST_MATRICES = 3  # dense in float32: the runtime has one at a time, and its transpose
_TOLERANCE = 1e-4  # of the largest value: float32 sums in two orders


@dataclass(frozen=True)
class Step:
    """Processor's seconds of a step, anonymous bytes beside the mapped codes, and the numbers that came out."""

    seconds: float
    memory: int | None
    output: np.ndarray


def print_table() -> bool:
    """Print it; returns whether all that is demanded is reached."""
    with tempfile.TemporaryDirectory(prefix="bench-gate-") as home:
        size, runtime, torch = compare(Path(home), MATRICES, SHAPE, _ROUNDS)
    weights = MATRICES * SHAPE[0] * SHAPE[1]
    columns = f"{'s/step':>8}{'ns/weight':>11}{'anonymous MiB':>15}{'of the bundle':>15}"
    print(f"{'gate numbers':<14}{'bundle bytes':>14}{columns}")
    for name, step in (("runtime", runtime), ("torch", torch)):
        times = f"{step.seconds:>8.2f}{step.seconds / weights * 1e9:>11.1f}"
        print(f"{name:<14}{size:>14,}{times}{memory_columns(step.memory, size)}")
    print(f"{'ratio':<28}{runtime.seconds / torch.seconds:>8.1f}")
    print(
        "torch: expands the same codes to float32 in each step, as the runtime does, and multiplies",
        flush=True,
    )
    return all_reached(misses(runtime, SHAPE))


def misses(runtime: Step, shape: tuple[int, int]) -> list[str]:
    """What is demanded and not reached; memory only where the system tells it."""
    bound = _MOST_MATRICES * 4 * shape[0] * shape[1]
    if runtime.memory is None or runtime.memory <= bound:
        return []
    return [
        f"gate numbers: anonymous memory of at most {_MOST_MATRICES} matrices in float32 ({bound >> 20} MiB)"
    ]


def compare(home: Path, matrices: int, shape: tuple[int, int], rounds: int) -> tuple[int, Step, Step]:
    """Bytes of a bundle in `home`, and a step of the runtime and of torch, each in a fresh process.

    Raises UserError as `refuse_difference` does.
    """
    draw_palettes(home, matrices, shape)
    size = saved_by("ours", home, matrices, shape).size
    runtime, torch = (
        _step(isolated(run, home=str(home), matrices=matrices, shape=list(shape), rounds=rounds))
        for run in (run_bundle, run_torch)
    )
    refuse_difference(runtime.output, torch.output)
    return size, runtime, torch


def refuse_difference(found: np.ndarray, expected: np.ndarray) -> None:
    """Raise UserError where the runtime and torch did not do the same work."""
    off, largest = np.abs(found - expected).max(), np.abs(expected).max()
    if not off <= _TOLERANCE * largest:
        raise UserError(
            f"the runtime's numbers are {off:.3g} off torch's, of which the largest is {largest:.3g}"
        )


def run_bundle(home: str, matrices: int, shape: list[int], rounds: int) -> dict[str, np.ndarray]:
    """A child's side: load the bundle and run it."""
    from workflow_scripts.checks.bench_bundle import FUNCTION, INPUT, OUTPUT
    from workflow_scripts.coreai.runtime import open_bundle

    with peak_anonymous() as peak, open_bundle(Path(home) / "ours.aimodel") as bundle:
        x = _input(shape)
        found = _timed(lambda: bundle.call(FUNCTION, {INPUT: x})[OUTPUT], rounds)
    return found | _memory(peak.bytes)


def run_torch(home: str, matrices: int, shape: list[int], rounds: int) -> dict[str, np.ndarray]:
    """A child's side: expand every matrix and multiply, in each step."""
    import torch

    torch.set_num_threads(1)
    palettes, x = map_palettes(Path(home), matrices, tuple(shape)), torch.from_numpy(_input(shape))

    def step() -> np.ndarray:
        products = (
            torch.nn.functional.linear(x, torch.from_numpy(palette.dequantize())) for palette in palettes
        )
        return sum(products).numpy()

    with peak_anonymous() as peak:
        found = _timed(step, rounds)
    return found | _memory(peak.bytes)


def _input(shape: list[int]) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, 1, shape[1]), np.float32)


def _timed(step: Callable[[], np.ndarray], rounds: int) -> dict[str, np.ndarray]:
    outputs = []
    (seconds,) = least_seconds(lambda: outputs.append(step()), rounds=rounds)
    return {"seconds": np.array(seconds), "output": outputs[-1]}


def _memory(peak: int | None) -> dict[str, np.ndarray]:
    return {} if peak is None else {"memory": np.array(peak)}


def _step(found: dict[str, np.ndarray]) -> Step:
    memory = int(found["memory"]) if "memory" in found else None
    return Step(float(found["seconds"]), memory, found["output"])
