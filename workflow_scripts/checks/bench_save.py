"""Part of `make bench`: the saving of a bundle beside coreai-core's own `save_asset`.

The same program is converted and saved by each in a fresh process, in one run and in turns. It holds palettes of 8 bits
of the real model's shapes, mapped from files as an export has them.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workflow_scripts.checks.bench_palettes import MATRICES, SHAPE, draw_palettes, map_palettes
from workflow_scripts.checks.measure import all_reached, memory_columns
from workflow_scripts.checks.memory import peak_anonymous
from workflow_scripts.coreai.isolated import isolated

_ROUNDS = 2
_MOST_MEMORY = 1 / 3  # of save_asset's: what the conversion takes without any constants is a fifth of it
_MOST_TIME = 1.0  # of save_asset's


@dataclass(frozen=True)
class Saved:
    """Processor's seconds of conversion and of saving, bytes of the program, and of anonymous memory in both steps."""

    converting: float
    saving: float
    size: int
    memory: int | None


def print_table() -> bool:
    """Print it; returns whether all that is demanded is reached."""
    print(
        f"{'saving':<12}{'bytes':>13}{'convert s':>11}{'save s':>8}{'anonymous MiB':>15}{'of the bundle':>15}"
    )
    with tempfile.TemporaryDirectory(prefix="bench-save-") as home:
        ours, theirs = compare(Path(home), MATRICES, SHAPE, _ROUNDS)
    for name, saved in (("ours", ours), ("save_asset", theirs)):
        times = f"{saved.converting:>11.2f}{saved.saving:>8.2f}"
        print(f"{name:<12}{saved.size:>13,}{times}{memory_columns(saved.memory, saved.size)}")
    print(
        f"{'ratio':<12}{'':>13}{ours.converting / theirs.converting:>11.2f}{ours.saving / theirs.saving:>8.2f}"
    )
    print(
        "save_asset: coreai-core's own, after a conversion of its own; memory is the peak of both steps",
        flush=True,
    )
    return all_reached(misses(ours, theirs))


def misses(ours: Saved, theirs: Saved) -> list[str]:
    """What is demanded and not reached; memory only where the system tells it."""
    in_time = ours.saving <= _MOST_TIME * theirs.saving
    demands = {f"saving: at most {_MOST_TIME:g} times the time of save_asset": in_time}
    if ours.memory is not None and theirs.memory is not None:
        little = ours.memory <= _MOST_MEMORY * theirs.memory
        demands[f"saving: at most {_MOST_MEMORY:.2g} of the anonymous memory of save_asset"] = little
    return [demand for demand, met in demands.items() if not met]


def compare(home: Path, matrices: int, shape: tuple[int, int], rounds: int) -> list[Saved]:
    """Our saving and theirs, the least of some rounds; the weights and two bundles are in `home` at a time."""
    draw_palettes(home, matrices, shape)
    runs = [[saved_by(way, home, matrices, shape) for way in ("ours", "theirs")] for _ in range(rounds)]
    return [_least(of_one) for of_one in zip(*runs, strict=True)]


def _least(runs: Sequence[Saved]) -> Saved:
    return Saved(
        min(run.converting for run in runs),
        min(run.saving for run in runs),
        runs[0].size,
        None if runs[0].memory is None else min(run.memory for run in runs),
    )


def saved_by(way: str, home: Path, matrices: int, shape: Sequence[int]) -> Saved:
    """One run in a fresh process, over the weights in `home`; `way` is `ours` or `theirs`."""
    found = isolated(save, way=way, home=str(home), matrices=matrices, shape=list(shape))
    memory = int(found["memory"])
    return Saved(
        float(found["converting"]), float(found["saving"]), int(found["size"]), None if memory < 0 else memory
    )


def save(way: str, home: str, matrices: int, shape: list[int]) -> dict[str, np.ndarray]:
    """The child's side: convert and save into `WAY.aimodel` in `home`; a memory of -1 is not known."""
    from workflow_scripts.checks.bench_bundle import program_of
    from workflow_scripts.coreai import private

    palettes, out = map_palettes(Path(home), matrices, tuple(shape)), Path(home) / f"{way}.aimodel"
    with peak_anonymous() as peak:
        times = [time.process_time()]
        if way == "ours":
            with private.reproducible_names():
                program = program_of(palettes)
            times.append(time.process_time())
            out.mkdir(exist_ok=True)
            private.write_asset(program, out, {})
        else:
            program = program_of(palettes)
            times.append(time.process_time())
            program.save_asset(out)
        times.append(time.process_time())
    converting, saving = np.diff(times)
    size = (out / "main.mlirb").stat().st_size
    memory = -1 if peak.bytes is None else peak.bytes
    return {"converting": converting, "saving": saving, "size": np.array(size), "memory": np.array(memory)}
