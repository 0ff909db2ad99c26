"""`make mutants`: would the gates notice? Single faults, each in a copy of the project, each with the gate to catch it.

Fails where a mutant survives, where another gate than the named one caught it, and where a required gate has no mutant
that it alone catches: whoever took such a gate away would lose nothing.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from workflow_scripts.checks.mutant_catalogue import LAYERS, by_name, layer_of
from workflow_scripts.checks.mutant_catalogue.mutant import Mutant
from workflow_scripts.checks.mutant_judgement import CAUGHT, Judgement, Outcome, judge, only_catchers
from workflow_scripts.checks.mutant_run import Base, build_base, run_mutant
from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError
from workflow_scripts.store.table import table

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TOLD = 160  # characters of a reason in a progress line


def main(arguments: list[str]) -> int:
    """Run the chosen mutants and print what became of them; returns the exit code."""
    options = _parse(arguments)
    mutants = chosen(options.layer, options.only)
    _exit_on_ends()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as home:
        print(f"building what {len(mutants)} mutants are compared with", flush=True)
        base = build_base(Path(home).resolve(), mutants, options.jobs)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
        outcomes = dict(_outcomes(base, mutants, options.jobs))
    judgements = {mutant.name: judge(mutant, outcomes[mutant.name]) for mutant in mutants}
    whole = not (options.layer or options.only)
    gates = read_config([]).gates.required if whole else sorted({m.caught_by for m in mutants if m.alone})
    print("\n" + "\n\n".join(report(mutants, judgements, outcomes, gates)))
    print(f"\n{len(mutants)} mutants in {time.monotonic() - start:.0f} s")
    return 0 if passed(mutants, judgements, gates) else 1


def chosen(layers: Sequence[str], names: Sequence[str]) -> list[Mutant]:
    """The mutants of some layers, or of all, or those with some names. Raises UserError for an unknown one."""
    unknown = [name for name in names if name not in by_name()]
    unknown += [name for name in layers if name not in LAYERS]
    if unknown:
        raise UserError(f"there is no mutant or layer {unknown[0]}: layers are {', '.join(LAYERS)}")
    wanted = [by_name()[name] for name in names] if names else []
    return wanted or [mutant for layer in layers or LAYERS for mutant in LAYERS[layer]]


def passed(mutants: Sequence[Mutant], judgements: Mapping[str, Judgement], gates: Sequence[str]) -> bool:
    """Every mutant is caught as it should be, and every gate is the only one to catch some."""
    needed = only_catchers(mutants, judgements, gates)
    return all(found.word == CAUGHT for found in judgements.values()) and all(needed.values())


def report(
    mutants: Sequence[Mutant],
    judgements: Mapping[str, Judgement],
    outcomes: Mapping[str, Outcome],
    gates: Sequence[str],
) -> Iterator[str]:
    """The tables: each mutant, caught and total by layer, what each gate alone stands against; and what went wrong."""
    rows = [("mutant", "layer", "fault", "caught by", "target", "seconds")]
    for mutant in mutants:
        word = judgements[mutant.name].word
        by = mutant.caught_by if word == CAUGHT else f"{word} (not {mutant.caught_by})"
        seconds = f"{outcomes[mutant.name].seconds:.0f}"
        rows.append((mutant.name, layer_of(mutant.name), mutant.fault, by, mutant.target, seconds))
    yield table(rows).rstrip()
    rows = [("layer", "caught", "total")]
    for layer in LAYERS:
        words = [judgements[m.name].word for m in mutants if layer_of(m.name) == layer]
        if words:
            rows.append((layer, str(words.count(CAUGHT)), str(len(words))))
    words = [found.word for found in judgements.values()]
    yield table([*rows, ("all", str(words.count(CAUGHT)), str(len(words)))]).rstrip()
    if gates:
        needed = only_catchers(mutants, judgements, gates)
        rows = [("without this gate", "these would ship")]
        yield table([*rows, *((gate, ", ".join(names) or "NONE") for gate, names in needed.items())]).rstrip()
    wrong = {name: found for name, found in judgements.items() if found.word != CAUGHT}
    if wrong:
        yield "\n".join(f"{name}: {found.word}: {found.told}" for name, found in wrong.items())


def _outcomes(base: Base, mutants: Sequence[Mutant], jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Each mutant's outcome by its name, as they come; long ones first, so that none is left alone at the end."""
    ordered = sorted(mutants, key=lambda mutant: not mutant.alone)
    known = by_name()
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_exit_on_ends) as pool:
        done = pool.imap_unordered(partial(_run, base), [mutant.name for mutant in ordered])
        for count, outcome in enumerate(done, 1):
            found = judge(known[outcome.mutant], outcome)
            told = " ".join(found.told.split())[:_TOLD]
            print(
                f"{count}/{len(mutants)}  {outcome.mutant}: {found.word}, {outcome.seconds:.0f} s: {told}",
                flush=True,
            )
            yield outcome.mutant, outcome
        pool.close()
        pool.join()


def _run(base: Base, name: str) -> Outcome:
    return run_mutant(base, by_name()[name])


def _exit_on_ends() -> None:
    """Let Ctrl-C and its like end this process in order, so that Snakemake is stopped and no copy is left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        for one in _ENDS:  # a second one must not break off the cleaning
            signal.signal(one, signal.SIG_IGN)
        sys.exit(130)

    for one in _ENDS:
        signal.signal(one, end)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--layer", action="append", default=[], help="the mutants of one layer")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one mutant")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="mutants side by side (default: cores)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as problem:
        sys.exit(f"error: {problem}")
