"""`make bench`: what the kernels read; quantizer, tables, saving and gates beside named baselines; a rebuild's cost.

A rebuild's cost is a share of a cold build of the embedded model.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workflow_scripts.checks import bench_gate, bench_kernels, bench_quantize, bench_save, bench_tables
from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.errors import UserError


@dataclass(frozen=True)
class Scenario:
    """A change to a finished build, and the share of a cold build that its rebuild should stay under."""

    name: str
    change: Callable[[Path], None]
    aim: float | None


def _nothing(project: Path) -> None:
    """A second run of the same command."""


def _touch_all(project: Path) -> None:
    for path in (
        *project.glob("workflow_scripts/**/*.*"),
        *project.glob("resources/**/*.*"),
        *project.glob("envs/*"),
    ):
        path.touch()


def _comment(project: Path) -> None:
    """In a module of every core: exports and references run, their outputs are equal, the rest are hits."""
    source = project / "workflow_scripts/model/attention.py"
    source.write_text(source.read_text() + "# a comment\n")


def _one_kernel(project: Path) -> None:
    """A bundle embeds its kernel's text, so its bytes change: its export, its gates and the packaging run."""
    source = project / "workflow_scripts/kernels/palette_matvec_int4.metal"
    source.write_text(source.read_text() + "// a comment\n")


def _delete_results(project: Path) -> None:
    shutil.rmtree(project / "results")


SCENARIOS = (
    Scenario("no-op", _nothing, 0.04),
    Scenario("touch all", _touch_all, 0.04),
    Scenario("delete results, store only", _delete_results, 0.15),
    Scenario("comment in the attention module", _comment, None),
    Scenario("edit of one kernel", _one_kernel, 0.2),
)

DEMANDING = (
    bench_quantize.print_tables,
    bench_tables.print_table,
    bench_save.print_table,
    bench_gate.print_table,
)
"""Parts that print their tables, and tell whether all that they demand is reached."""


def main() -> int:
    """Print the tables. A miss of what a part demands beside its baseline fails; a rebuild's aims are aims."""
    bench_kernels.print_table()
    print()
    reached = True
    for print_part in DEMANDING:
        reached &= print_part()
        print()
    with tempfile.TemporaryDirectory(prefix="bench-") as home:
        project, environment = Path(home) / "project", {"GEMMA4_STORE": str(Path(home) / "store")}
        copy_project(project)
        cold = _seconds(project, environment)
        print(f"{'scenario':<34}{'seconds':>9}{'of cold':>9}{'aim':>7}")
        print(f"{'cold':<34}{cold:>9.1f}{1:>9.3f}", flush=True)
        for scenario in SCENARIOS:
            scenario.change(project)
            seconds = _seconds(project, environment)
            aim = "" if scenario.aim is None else f"{scenario.aim:>7.2f}"
            miss = "  missed" if scenario.aim is not None and seconds / cold > scenario.aim else ""
            print(f"{scenario.name:<34}{seconds:>9.1f}{seconds / cold:>9.3f}{aim}{miss}", flush=True)
    return 0 if reached else 1


def _seconds(project: Path, environment: dict[str, str]) -> float:
    start = time.monotonic()
    build(project, "-j2", "release", environment=environment)
    return time.monotonic() - start


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as problem:
        sys.exit(f"error: {problem}")
