"""The summary of a release as tables of text: for the terminal at the end of a run, and as the report's first pages.

`summary RESULTS` prints it again.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from workflow_scripts.report.facts import Facts, Gate
from workflow_scripts.store.command import show_size
from workflow_scripts.store.table import table
from workflow_scripts.usage.watch import mebibytes

Rows = list[tuple[str, ...]]


def main(arguments: list[str]) -> int:
    """Print the summary of a finished release. Raises UserError where there is none."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts summary", description=__doc__)
    parser.add_argument("results", type=Path, help="such as results/gemma-4-tiny")
    facts = Facts.read(parser.parse_args(arguments).results)
    print(summary(facts), *(f"not done: {line}" for line in facts.not_done()), sep="\n")
    return 0


def summary(facts: Facts) -> str:
    """Folders, gates and what the jobs took, as plain text."""
    return "\n\n".join([table(folder_rows(facts)), table(gate_rows(facts)), took(facts)])


def folder_rows(facts: Facts) -> Rows:
    """What was built: each folder with its bundles and bytes."""
    folders = facts.release["folders"]
    rows = [
        (name, show_size(entry["bytes"]), str(len(entry["contents"])), entry["driver"] or "-")
        for name, entry in folders.items()
    ]
    total = show_size(sum(entry["bytes"] for entry in folders.values()))
    return [("FOLDER", "SIZE", "BUNDLES", "DRIVER"), *rows, ("all", total, "", "")]


def gate_rows(facts: Facts) -> Rows:
    """Each kind of gate: over how many targets it passed, and how near one of its figures came to its bound.

    A figure that has no margin (`facts.Kind`) is near to nothing; where a gate has no other, they are counted.
    """
    kinds = list(dict.fromkeys(gate.gate for gate in facts.gates))
    return [
        ("GATE", "PASSED", "NOT RUN", "FAILED", "CHECKS", "OF BOUND", "NEAREST"),
        *(_gate_row(kind, [gate for gate in facts.gates if gate.gate == kind]) for kind in kinds),
    ]


def _gate_row(kind: str, gates: list[Gate]) -> tuple[str, ...]:
    counts = Counter(gate.verdict for gate in gates)
    checks = str(sum(len(gate.checks) for gate in gates))
    bounded = [(check.margin, gate, check) for gate in gates if (check := gate.tightest)]
    used, where = "-", _without_margin(gates)
    if bounded:
        share, gate, check = max(bounded, key=lambda entry: entry[0])
        used, where = f"{share:.3f}", shorten(f"{gate.target.rpartition('/')[2]}: {check.name}", 40)
    return (kind, *(str(counts[verdict]) for verdict in ("pass", "not_run", "fail")), checks, used, where)


def _without_margin(gates: list[Gate]) -> str:
    """Of gates of which no figure could come near to its bound, what their figures are: `4 rounding`."""
    kinds = Counter(check.kind for gate in gates for check in gate.checks if check.kind)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "-"


def shorten(text: str, width: int) -> str:
    """A text without its middle where it is too long."""
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{text[:half]}...{text[-(width - 3 - half) :]}"


def took(facts: Facts) -> str:
    """Seconds and largest memory of the jobs whose figures are known."""
    if not facts.jobs:
        return "no job ran for this release: all came from the store"
    seconds = sum(job.figures.seconds for job in facts.jobs)
    peak = max(job.figures.anonymous or 0 for job in facts.jobs)
    return f"{len(facts.jobs)} jobs, {seconds:,.0f} job-seconds, {mebibytes(peak):,} MiB of memory in the largest"


def stage_rows(facts: Facts) -> Iterator[tuple[str, int, float, int]]:
    """Stage, number of jobs, seconds in all, largest anonymous memory in bytes."""
    for stage in sorted({job.stage for job in facts.jobs}):
        figures = [job.figures for job in facts.jobs if job.stage == stage]
        seconds = sum(entry.seconds for entry in figures)
        yield stage, len(figures), seconds, max(entry.anonymous or 0 for entry in figures)
