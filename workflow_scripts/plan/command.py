"""`python -m workflow_scripts plan [TARGET]`: what a run would take. Nothing is built, fetched or written.

For each stage: jobs, and of them those that are up to date or in a store; bytes of the results, and those of them that
are new; memory that the largest job asks for; seconds of the jobs to build, and where they are from. (`why` says of
each result why it is built, `usage` what jobs took.)
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from workflow_scripts import why
from workflow_scripts.doctor import memory_bytes
from workflow_scripts.errors import UserError
from workflow_scripts.plan import jobs
from workflow_scripts.plan.jobs import Job, Plan, least_seconds
from workflow_scripts.plan.seconds import DOCUMENTED
from workflow_scripts.store.command import show_size
from workflow_scripts.store.table import table

_HEADING = (
    "STAGE",
    "JOBS",
    "UP TO DATE",
    "LOCAL STORE",
    "SHARED STORE",
    "BUILD",
    "BYTES",
    "NEW BYTES",
    "MEMORY MB",
    "SECONDS",
    "SECONDS ARE",
)


def main(arguments: list[str]) -> int:
    """Print the plan; raises UserError where Snakemake refuses the workflow, the config or the target."""
    options = _parse(arguments)
    settings = ["--cores", str(options.cores)]
    settings += ["--configfile", *options.configfile] if options.configfile else []
    settings += ["--config", *options.config] if options.config else []
    commands = why.stage_commands(options.target, settings)
    if not commands:
        raise UserError(f"`{options.target}` needs no stage, so there is nothing to plan")
    plan = Plan.of(commands, why.explain(commands))
    least, limit = least_seconds(plan.jobs, options.cores, options.mem_mb)
    if options.json:
        print(json.dumps(_as_json(plan, options, least, limit), indent=2))
    else:
        print(
            "\n".join([table(_rows(plan.jobs)), "", *_totals(plan.jobs, options, least, limit), *plan.notes])
        )
    return 0


def _rows(planned: list[Job]) -> list[tuple[str, ...]]:
    groups = list(dict.fromkeys(job.group for job in planned))
    rows = [_row(group, [job for job in planned if job.group == group]) for group in groups]
    return [_HEADING, *rows, (*_row("all", planned)[:-1], "")]


def _row(name: str, planned: list[Job]) -> tuple[str, ...]:
    states = Counter(job.state for job in planned)
    counts = (str(states[state]) for state in (jobs.BUILT, jobs.LOCAL, jobs.SHARED, jobs.BUILD))
    return (
        name,
        str(len(planned)),
        *counts,
        _sum(job.size for job in planned),
        _sum(job.new for job in planned),
        str(max(job.mem_mb or 0 for job in planned)),
        _sum(job.seconds for job in planned),
        _origins(planned),
    )


def _sum(values: Iterable[float | None]) -> str:
    """The sum of what is known; `-` where nothing is."""
    known = [value for value in values if value is not None]
    return f"{round(sum(known)):,}" if known else "-"


def _origins(planned: list[Job]) -> str:
    """Where the seconds of the jobs to build come from; with their number where they differ."""
    counts = Counter(job.seconds_from for job in planned if job.state == jobs.BUILD)
    if len(counts) < 2:
        return next(iter(counts), "")
    return "; ".join(f"{count} {origin}" for origin, count in counts.items())


def _totals(planned: list[Job], options: argparse.Namespace, least: float, limit: str) -> list[str]:
    building = [job for job in planned if job.state == jobs.BUILD]
    lines = [f"{len(building)} of {len(planned)} jobs build something" + _waiting(building)]
    fetched = [job for job in planned if job.state == jobs.SHARED]
    new = sum(job.new or 0 for job in building)
    lines.append(
        f"new on the disk: {show_size(new)} built, {show_size(sum(job.new or 0 for job in fetched))} from the shared "
        "store; what is large is linked into folders, release and local store"
    )
    for label, unknown in (("bytes", "new"), ("seconds", "seconds")):
        if none := sum(getattr(job, unknown) is None for job in planned):
            lines.append(f"{label} of {none} jobs are unknown, and not in the sums")
    if any(job.seconds_from == DOCUMENTED for job in building):
        lines.append(
            "documented seconds are of another machine, right to a factor of two; gates count answers in full length"
        )
    if building:
        lines.append(
            f"at least {_duration(least)} on {options.cores} cores, which {limit} sets; "
            f"{_duration(sum(job.seconds or 0 for job in building))} of jobs"
        )
    return lines


def _waiting(building: list[Job]) -> str:
    waiting = sum(job.waits for job in building)
    if not waiting:
        return ""
    return (
        f", at most: {waiting} wait for an input, and where that comes out as before, a store may have them"
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _as_json(plan: Plan, options: argparse.Namespace, least: float, limit: str) -> dict:
    return {
        "results": str(plan.results),
        "target": options.target,
        "checkpoint_bytes": plan.checkpoint,
        "cores": options.cores,
        "mem_mb": options.mem_mb,
        "least_seconds": round(least, 1),
        "least_seconds_set_by": limit,
        "notes": plan.notes,
        "jobs": [
            asdict(job) | {"seconds": None if job.seconds is None else round(job.seconds, 3)}
            for job in plan.jobs
        ],
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts plan", description=__doc__)
    parser.add_argument(
        "target", nargs="?", default="release", help="a target of the workflow (default: release)"
    )
    parser.add_argument("--configfile", nargs="+", default=[], metavar="FILE", help="as given to snakemake")
    parser.add_argument("--config", nargs="+", default=[], metavar="KEY=VALUE", help="as given to snakemake")
    parser.add_argument("--cores", type=_positive, default=os.cpu_count() or 1, help="default: all")
    parser.add_argument(
        "--mem-mb",
        type=_positive,
        default=memory_bytes() // 1_000_000,
        help="megabytes of memory for all jobs (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="every job, for programs")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
