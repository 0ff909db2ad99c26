"""`python -m workflow_scripts usage [results/MODEL]`: what each job took, and what its results hold on the disk.

The store is that of a build with the same model files: GEMMA4_STORE, else --store, else `store.folder` of the config.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.manifest import Manifest, tree_path
from workflow_scripts.store.command import show_size, store_folder
from workflow_scripts.store.levels import open_store
from workflow_scripts.store.table import table
from workflow_scripts.usage import disk
from workflow_scripts.usage.record import Record, read_records
from workflow_scripts.usage.watch import mebibytes

_LISTED_FROM = 1 << 20  # bytes that copies waste, to be worth a line
_LISTED = 10
_SHOWN = 3  # results without figures that are named
_HEADING = ("STAGE", "ARTIFACT", "SECONDS", "CPU", "BYTES", "WRITTEN", "ANONYMOUS MiB", "RESIDENT MiB")

Rows = list[tuple[str, ...]]
Print = Callable[[Rows], str]


def main(arguments: list[str]) -> int:
    """Print both reports. Raises UserError where there are no results, or those of several models and none is named."""
    options = _parse(arguments)
    results = _results(options.results)
    show = _markdown if options.markdown else table
    built = dict(disk.manifests(results))
    store = open_store(store_folder(options.store, options.configfile), None)
    print("\n".join(_jobs(results, built, options.by, show)), end="\n\n")
    print("\n".join(_disk(results, built, store.local.root if store else None, show)))
    return 0


def _results(named: Path | None) -> Path:
    """The folder of one model's results."""
    found = [named] if named else sorted(path.parent for path in Path("results").glob("*/logs"))
    if len(found) > 1:
        raise UserError(f"name one of the models: {', '.join(map(str, found))}")
    if not found or not (found[0] / "logs").is_dir():
        raise UserError(f"{named or 'results'} holds no results of a model: build some, or name their folder")
    return found[0]


def _jobs(results: Path, built: dict[Path, Manifest], by: str, show: Print) -> Iterator[str]:
    """The jobs whose figures are known, with sums and peaks; then the results that have none."""
    order: dict[str, Callable[[Record], tuple]] = {
        "when": lambda one: (one.ended,),
        "stage": lambda one: (one.stage, one.artifact, one.ended),
    }
    records = sorted(read_records(results, built), key=order[by])
    if records:
        yield show([_HEADING, *map(_row, records), _totals(records)])
        yield ""
        yield from _largest(records)
    known = {record.key for record in records}
    silent = [
        tree_path(path).relative_to(results).as_posix()
        for path, content in built.items()
        if content.ingredients.key not in known
    ]
    if silent:
        shown = ", ".join(silent[:_SHOWN]) + (", ..." if len(silent) > _SHOWN else "")
        yield f"no figures of {len(silent)}, which came from the store or an older build: {shown}"


def _row(record: Record) -> tuple[str, ...]:
    took = record.figures
    return (
        record.stage,
        f"{record.artifact} (failed)" if record.failed else record.artifact,
        f"{took.seconds:.1f}",
        f"{took.cpu_seconds:.1f}",
        _number(record.size),
        _number(took.written),
        _number(took.anonymous, mebibytes),
        _number(took.resident, mebibytes),
    )


def _totals(records: list[Record]) -> tuple[str, ...]:
    """Sums, and of memory the largest."""
    took = [record.figures for record in records]
    return (
        "all",
        f"{len(records)} jobs",
        f"{sum(one.seconds for one in took):.1f}",
        f"{sum(one.cpu_seconds for one in took):.1f}",
        f"{sum(record.size or 0 for record in records):,}",
        _number(_over(sum, (one.written for one in took))),
        _number(_over(max, (one.anonymous for one in took)), mebibytes),
        _number(_over(max, (one.resident for one in took)), mebibytes),
    )


def _over(of: Callable[[list[int]], int], values: Iterable[int | None]) -> int | None:
    """A sum or maximum of what was counted; None where nothing was."""
    counted = [value for value in values if value is not None]
    return of(counted) if counted else None


def _largest(records: list[Record]) -> Iterator[str]:
    slow = max(records, key=lambda one: one.figures.seconds)
    yield f"longest: {slow.stage} {slow.artifact}, {slow.figures.seconds:.0f} s"
    for kind in ("anonymous", "resident"):
        large = max(records, key=lambda one: getattr(one.figures, kind) or 0)
        size = getattr(large.figures, kind)
        if size is not None:
            yield f"most {kind} memory: {large.stage} {large.artifact}, {mebibytes(size):,} MiB"


def _number(value: int | None, unit: Callable[[int], int] = int) -> str:
    return "-" if value is None else f"{unit(value):,}"


def _disk(results: Path, built: dict[Path, Manifest], store: Path | None, show: Print) -> Iterator[str]:
    """What is held together and apart, and what is held more than once."""
    found = disk.measure(results, built, store)
    rows: Rows = [("ON THE DISK", "FILES", "BYTES", "UNIQUE", "HELD")]
    rows += [_sum_row(name, part) for name, part in found.parts.items() if part.files]
    yield show([*rows, _sum_row("together", found.together)])
    yield ""
    yield f"held / unique: {found.ratio:.3f}"
    if disk.hides_clones(results):
        yield (
            "This file system can clone: results share blocks that are not visible here, so HELD is too high "
            "by an unknown part."
        )
    wasted = [copies for copies in found.copies if copies.extra >= _LISTED_FROM]
    for copies in wasted[:_LISTED]:
        names = ", ".join(map(str, copies.paths[:2])) + (", ..." if len(copies.paths) > 2 else "")
        yield f"{len(copies.paths)} copies of {show_size(copies.size)}: {names}"
    if len(wasted) > _LISTED:
        rest = sum(copies.extra for copies in wasted[_LISTED:])
        yield f"copies of {len(wasted) - _LISTED} more: {show_size(rest)} that one of each would save"


def _sum_row(name: str, part: disk.Sum) -> tuple[str, ...]:
    return name, f"{part.files:,}", f"{part.size:,}", f"{part.unique_size:,}", f"{part.held_size:,}"


def _markdown(rows: Rows) -> str:
    """The table as Markdown, numbers to the right as in the terminal."""
    heading, *body = rows
    numbers = [
        all(cell[:1].isdigit() or cell == "-" for cell in column) for column in zip(*body, strict=True)
    ]
    rule = tuple("---:" if right else "---" for right in numbers)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, rule, *body))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts usage", description=__doc__)
    parser.add_argument(
        "results", nargs="?", type=Path, metavar="results/MODEL", help="default: the only model"
    )
    parser.add_argument("--by", choices=("when", "stage"), default="when", help="order of the jobs")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    parser.add_argument("--store", metavar="FOLDER", help="another folder; GEMMA4_STORE goes over it")
    parser.add_argument(
        "--configfile", nargs="+", default=[], type=Path, metavar="FILE", help="as given to snakemake"
    )
    return parser.parse_args(arguments)
