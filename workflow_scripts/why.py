"""`python -m workflow_scripts why [TARGET]`: what a run would rebuild, and why. Nothing is written or built.

Snakemake says which stage commands the target needs; the key of each is computed as the runner does and compared with
the manifest of the last build. The digest of an input that is up to date, or in the store, is known; behind one that
must be rebuilt it is not, since the new build may give the same bytes.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from workflow_scripts import manifest
from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError
from workflow_scripts.files import HashMemory, canonical_json
from workflow_scripts.stages import runner
from workflow_scripts.store.levels import Store, open_store
from workflow_scripts.store.table import table

UP_TO_DATE, STORED, REBUILD, DEPENDS = "up to date", "from the store", "rebuild", "depends on"
_COMMAND = "python -m workflow_scripts stage "
_NAMED = 3  # inputs that are named before "and 7 more"
_SHOWN = 60  # characters of a value; dialogues and lists can be long


@dataclass(frozen=True)
class Command:
    """One stage command line of the workflow, with the threads and the megabytes of memory that its rule asks for."""

    stage: str
    inputs: dict[str, Path]
    params: dict[str, Any]
    output: Path
    store: Store | None
    log: Path = Path()
    threads: int = 1
    mem_mb: int | None = None

    @property
    def name(self) -> str:
        """The result's place below `results/<model>/`."""
        return Path(*manifest.tree_path(self.output).parts[2:]).as_posix()


@dataclass(frozen=True)
class Answer:
    """What happens to one result. `digest` is None where only a build can tell; `reasons` are lines for people.

    `found` is the manifest of what is there already, in the results or a store; `shared` says that only the shared one
    has it.
    """

    state: str
    digest: str | None
    reasons: list[str] = field(default_factory=list)
    found: manifest.Manifest | None = None
    shared: bool = False


def main(arguments: list[str]) -> int:
    """Print the table; the exit code is 0 unless the workflow itself is refused."""
    options = _parse(arguments)
    settings = ["--configfile", *options.configfile] if options.configfile else []
    commands = stage_commands(options.target, settings)
    answers = explain(commands)
    rows = [("RESULT", "STATE", "WHY")]
    for command, answer in zip(commands, answers, strict=True):
        first, *more = answer.reasons or [""]
        rows.append((command.name, answer.state, first))
        rows += [("", "", line) for line in more]
    print(table(rows))
    counts = {
        state: sum(answer.state == state for answer in answers) for state in dict.fromkeys(_states(answers))
    }
    print(f"\n{len(answers)} results: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    return 0


def stage_commands(target: str, settings: list[str]) -> list[Command]:
    """The stage commands that a target needs, inputs before what reads them; `settings` are options of Snakemake.

    Raises UserError with Snakemake's words if it refuses the workflow, the config or the target.
    """
    options = ["--forceall", "--nolock", "--nocolor", "--snakefile", str(ROOT / "Snakefile"), *settings]
    run = subprocess.run(
        [sys.executable, "-m", "workflow_scripts.dry_run", *options, "--", target],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if run.returncode:
        raise UserError(f"the workflow cannot plan `{target}`:\n{_trouble(run.stderr)}")
    jobs = [job for job in json.loads(run.stdout) if (job["command"] or "").startswith(_COMMAND)]
    # One store for all: a shared one that does not answer is waited for once, and trouble is said once.
    stores: dict[tuple[str | None, str | None], Store | None] = {}
    return _in_order([_command(job, stores) for job in jobs])


def explain(commands: list[Command]) -> list[Answer]:
    """An answer for each command; they come with inputs before what reads them."""
    answers: dict[Path, Answer] = {}
    names = {command.output: command.name for command in commands}
    for command in commands:
        answers[command.output] = _explain(command, answers, names)
    return [answers[command.output] for command in commands]


def differences(old: manifest.Ingredients, new: manifest.Ingredients) -> list[str]:
    """One line per ingredient that is not the same; inputs that are not known yet are left out of `new`."""
    return [
        *_changes("source", old.code, new.code, show=None),
        *_changes("parameter", _flat(old.params), _flat(new.params), show=_show),
        *_changes(
            "input",
            {name: old.inputs.get(name) for name in new.inputs if name in old.inputs},
            new.inputs,
            None,
        ),
        *(f"input {name}: removed" for name in sorted(old.inputs.keys() - new.inputs.keys())),
        *_changes("tool", old.tools, new.tools, show=str),
        *_changes("host", old.host, new.host, show=str),
    ]


def _explain(command: Command, answers: dict[Path, Answer], names: dict[Path, str]) -> Answer:
    hashes = HashMemory(runner.hash_memory_path(command.output))
    digests: dict[str, str] = {}
    unknown: list[str] = []
    for name, path in sorted(command.inputs.items()):
        before = answers.get(path)
        if before is not None and before.digest is None:
            unknown.append(name)
        elif before is not None and before.digest is not None:
            digests[name] = before.digest
        else:
            try:
                digests[name] = _digest(path, hashes)
            except UserError as problem:
                return Answer(REBUILD, None, [f"input {name}: {problem}"])
    if unknown:
        return _waiting(command, digests, [names[command.inputs[name]] for name in unknown], unknown)
    new = runner.ingredients_of(command.stage, digests, command.params, command.output)
    last = _last_build(command.output)
    reasons = ["never built"] if last is None else differences(last.ingredients, new)
    if last is not None and not reasons:
        try:
            manifest.check_tree(last, command.output)
            return Answer(UP_TO_DATE, last.identity, found=last)
        except UserError as problem:
            reasons = [str(problem)]
    stored = command.store.find(new) if command.store else None
    if stored is not None:
        shared = command.store.local.find(new) is None
        return Answer(STORED, stored.identity, reasons, stored, shared)
    return Answer(REBUILD, None, reasons)


def _waiting(command: Command, digests: dict[str, str], results: list[str], unknown: list[str]) -> Answer:
    """The answer where an input must be built first; what is known to differ anyway is said as well."""
    more = f" and {len(results) - _NAMED} more" if len(results) > _NAMED else ""
    reasons = [", ".join(results[:_NAMED]) + more]
    last = _last_build(command.output)
    if last is None:
        return Answer(DEPENDS, None, [*reasons, "never built"])
    known = digests | {
        name: last.ingredients.inputs[name] for name in unknown if name in last.ingredients.inputs
    }
    new = runner.ingredients_of(command.stage, known, command.params, command.output)
    return Answer(DEPENDS, None, [*reasons, *differences(last.ingredients, new)])


def _digest(path: Path, hashes: HashMemory) -> str:
    """Digest of an input that no command of this target makes; nothing is written for it."""
    if not runner.is_manifest(path):
        return runner.input_digest(path, hashes)
    found = manifest.read_manifest(path)
    manifest.check_tree(found, path)
    return found.identity


def _last_build(output: Path) -> manifest.Manifest | None:
    try:
        return manifest.read_manifest(output)
    except UserError:
        return None


def _changes(kind: str, old: dict[str, Any], new: dict[str, Any], show: Any) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            yield f"{kind} {name}: added" + (f" ({show(new[name])})" if show else "")
        elif name not in new:
            yield f"{kind} {name}: removed" + (f" (was {show(old[name])})" if show else "")
        elif old[name] != new[name]:
            yield f"{kind} {name}: " + (f"{show(old[name])} -> {show(new[name])}" if show else "changed")


def _flat(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters with nested keys and list positions joined, so that a difference names its place."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        nested = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(nested, dict) and nested:
            flat |= {f"{name}.{inner}": leaf for inner, leaf in _flat(nested).items()}
        else:
            flat[str(name)] = value
    return flat


def _show(value: Any) -> str:
    text = " ".join(canonical_json(value).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _states(answers: list[Answer]) -> Iterator[str]:
    yield from (
        state for state in (UP_TO_DATE, STORED, REBUILD, DEPENDS) if any(a.state == state for a in answers)
    )


def _command(job: dict[str, Any], stores: dict[tuple[str | None, str | None], Store | None]) -> Command:
    options = runner.parse_arguments(shlex.split(job["command"].removeprefix(_COMMAND)))
    place = options.store, options.shared_store
    if place not in stores:
        stores[place] = open_store(*place)
    return Command(
        options.stage,
        options.inputs,
        options.params,
        options.output,
        stores[place],
        options.log,
        job["threads"],
        job["mem_mb"],
    )


def _in_order(commands: list[Command]) -> list[Command]:
    by_output = {command.output: command for command in commands}
    graph = {
        command.output: [path for path in command.inputs.values() if path in by_output]
        for command in commands
    }
    return [by_output[output] for output in TopologicalSorter(graph).static_order()]


def _trouble(output: str) -> str:
    """What Snakemake complains about, without its banner."""
    lines = [
        line for line in output.splitlines() if not line.lstrip().startswith(("Using workflow", 'File "'))
    ]
    starts = [i for i, line in enumerate(lines) if "Error" in line or "Exception" in line]
    return "\n".join(f"  {line}" for line in lines[starts[0] if starts else -10 :])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts why", description=__doc__)
    parser.add_argument(
        "target", nargs="?", default="release", help="a target of the workflow (default: release)"
    )
    parser.add_argument("--configfile", nargs="+", default=[], metavar="FILE", help="as given to snakemake")
    return parser.parse_args(arguments)
