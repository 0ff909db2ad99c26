"""Runs a mutant: a copy of a finished project with one fault in it, built and judged by Snakemake like any other.

The copies share a store of their own, filled from the user's: so what does not feel a fault is not built again, by the
same content keys as ever, and no mutant comes into the user's store.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.checks.mutant_catalogue.mutant import NEXT_RUN, TINY, VERIFY, Edit, Mutant
from workflow_scripts.checks.mutant_judgement import Failure, Outcome
from workflow_scripts.closure import ROOT
from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_atomic
from workflow_scripts.store.levels import default_folder

_SAID = re.compile(r"(\S+) (\S+): (internal error|error): (.*)")
_MADE_AGAIN = re.compile(r"(.*): it will be made again")
_TAIL = 15  # lines of a run that failed without saying why


@dataclass(frozen=True)
class Base:
    """A finished project in the folder `home`, and the store of its copies."""

    home: Path

    @property
    def project(self) -> Path:
        """The checkout, with results."""
        return self.home / "base"

    @property
    def environment(self) -> dict[str, str]:
        """Of every run in a copy."""
        return {"GEMMA4_STORE": str(self.home / "store"), "GEMMA4_STORE_SHARED": "off"}


def build_base(home: Path, mutants: Iterable[Mutant], jobs: int) -> Base:
    """Copy the project and build all that the mutants will ask for. Raises UserError where that fails."""
    base, targets = Base(home), {}
    for mutant in mutants:
        targets.setdefault(mutant.config, set()).update(_results(mutant))
    copy_project(base.project)
    users = os.environ.get("GEMMA4_STORE") or str(default_folder())
    environment = base.environment | {"GEMMA4_STORE_SHARED": users}
    for config, wanted in sorted(targets.items()):
        arguments = [*sorted(wanted), "--cores", str(jobs), *_config(config)]
        build(base.project, *arguments, environment=environment)
    return base


def run_mutant(base: Base, mutant: Mutant) -> Outcome:
    """What failed in a copy with the mutant's fault in it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{mutant.name}-", dir=base.home) as place:
        project = Path(place) / "project"
        shutil.copytree(base.project, project, symlinks=True)
        for edit in mutant.edits:
            apply(edit, project)
        results = project / "results" / model_of(mutant.config)
        if mutant.damage:
            mutant.damage(results)
        if mutant.caught_by == VERIFY:
            failures, crashes = _verify(project, results), []
        else:
            failures, crashes = _build(base, mutant, project, results)
        refusal = _refusal(base, mutant, project, results) if mutant.alone and not crashes else ""
        return Outcome(mutant.name, time.monotonic() - start, tuple(failures), tuple(crashes), refusal)


def apply(edit: Edit, project: Path) -> None:
    """Change a source of a project. Raises UserError where the old text does not occur exactly once."""
    path = project / edit.file
    source = path.read_text(encoding="utf-8")
    if (count := source.count(edit.old)) != 1:
        raise UserError(f"{edit.file} has {count} times, not once: {edit.old!r}")
    write_atomic(path, source.replace(edit.old, edit.new))


def model_of(config: str) -> str:
    """The model of a configuration of this project."""
    return read_config([ROOT / config] if config != TINY else []).model


def _config(config: str) -> list[str]:
    """To stand last: the option takes all that follows it."""
    return [] if config == TINY else ["--configfile", config]


def _results(mutant: Mutant) -> list[str]:
    """The mutant's targets as Snakemake takes them."""
    folder = f"results/{model_of(mutant.config)}"
    return [f"{folder}/{name}.manifest.json" if "/" in name else name for name in mutant.targets]


def _build(base: Base, mutant: Mutant, project: Path, results: Path) -> tuple[list[Failure], list[str]]:
    """Failures and crashes of a run of Snakemake."""
    lines: list[str] = []
    arguments = [*_results(mutant), "--cores", "1", "--keep-going", *_config(mutant.config)]
    try:
        build(project, *arguments, environment=base.environment, on_line=lines.append)
        failed = False
    except UserError:
        failed = True
    failures = [*_failed_gates(results), *_made_again(lines)]
    crashes = []
    for match in filter(None, map(_SAID.fullmatch, (line.strip() for line in lines))):
        stage, artifact, kind, message = match.groups()
        if kind == "internal error":
            crashes.append(f"{stage} {artifact}: {message}")
        elif not message.startswith("gate "):  # a gate's failure is in its verdict
            failures.append(Failure(f"stage {stage}", artifact, message))
    if failed and not failures and not crashes:
        crashes.append(" | ".join(lines[-_TAIL:]))
    return failures, crashes


def _failed_gates(results: Path) -> Iterator[Failure]:
    """From the verdicts: in the finished project there was none that failed."""
    for path in sorted(results.glob("gates/**/verdict.json")):
        verdict = json.loads(path.read_text(encoding="utf-8"))
        if verdict["verdict"] == "fail":
            target = path.parent.relative_to(results / "gates" / verdict["gate"])
            yield Failure(verdict["gate"], target.as_posix(), verdict["reason"])


def _made_again(lines: Iterable[str]) -> Iterator[Failure]:
    for match in filter(None, map(_MADE_AGAIN.fullmatch, lines)):
        _, _, stage, artifact, *_ = re.split("[/ ]", match[1])  # results, the model
        yield Failure(NEXT_RUN, f"{stage}/{artifact}", match[1])


def _verify(project: Path, results: Path) -> list[Failure]:
    command = [sys.executable, "-m", "workflow_scripts", "verify", str(results / "release")]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=_plain_environment())
    return [Failure(VERIFY, "release", done.stdout + done.stderr)] if done.returncode else []


def _refusal(base: Base, mutant: Mutant, project: Path, results: Path) -> str:
    """Why no release is made and verified once the mutant's gate is none of the required ones; empty where one is."""
    config = read_config([ROOT / mutant.config] if mutant.config != TINY else [])
    left = [gate for gate in config.gates.required if gate != mutant.caught_by]
    overlay = project / "without.yaml"
    overlay.write_text(yaml.safe_dump({"gates": {"required": left}}), encoding="utf-8")
    arguments = [*(_config(mutant.config) or ["--configfile"]), overlay.name]
    lines: list[str] = []
    try:
        build(
            project, "release", "--cores", "1", *arguments, environment=base.environment, on_line=lines.append
        )
    except UserError:
        said = [match[0] for match in map(_SAID.search, lines) if match]
        return " | ".join(said or lines[-_TAIL:])
    return " | ".join(failure.reason for failure in _verify(project, results))


def _plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
