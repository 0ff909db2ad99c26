"""The one runner of every stage: arguments, log, key, store, atomic result, manifest.

A rule calls `python -m workflow_scripts stage NAME --input name=path ... --params JSON --output MANIFEST --log FILE`.
An input that is a manifest stands for its result folder, which is checked before it is read; any other input is
a plain file or folder, whose content is hashed. The stage's module has one function `run(job)`, which
reads `job.inputs` and `job.params` and fills the empty folder `job.out`. A result that the store holds under the key
is taken from there, before the stage's module and what it needs are imported.
"""

import argparse
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from workflow_scripts import closure, manifest
from workflow_scripts.collection import paused_collection
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.files import (
    HashMemory,
    alone,
    canonical_json,
    new_tree,
    remove_stale_siblings,
    sha256_text,
    tree_files,
)
from workflow_scripts.progress import TERMINAL, working
from workflow_scripts.stages.job import Job
from workflow_scripts.store.levels import Store, open_store
from workflow_scripts.usage.record import write_record
from workflow_scripts.usage.watch import Figures, Watch

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The manifest of a finished result, and whether the store had it."""

    manifest: manifest.Manifest
    from_store: bool


def main(arguments: list[str]) -> int:
    """Run one stage from its command line; returns the exit code."""
    options = parse_arguments(arguments)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    with _logging_to(options.log) as terminal:
        watch = Watch()
        outcome = _execute_or_say(options, terminal)
        _report(options, outcome, watch.stop())
    return 1 if outcome is None else 0


def _execute_or_say(options: argparse.Namespace, terminal: TextIO) -> Outcome | None:
    """The result, or None where it failed, which the terminal and the log then say."""
    title = f"{options.stage} {manifest.tree_path(options.output).name}"
    try:
        store = open_store(options.store, options.shared_store)
        return execute(options.stage, options.inputs, options.params, options.output, store)
    except UserError as problem:
        print(f"{title}: error: {problem}", file=terminal)
        _LOG.error("%s", problem)
    except OSError as problem:
        place = problem.filename or manifest.tree_path(options.output)
        print(
            f"{title}: error: {problem.strerror or problem}: {place}: mend that and run again", file=terminal
        )
        _LOG.error("%s: %s", problem.strerror or problem, place)
    except Exception as problem:
        print(f"{title}: internal error: {problem!r}; the traceback is in {options.log}", file=terminal)
        _LOG.error("%s", traceback.format_exc())
    return None


def _report(options: argparse.Namespace, outcome: Outcome | None, figures: Figures) -> None:
    """Say what the job took, and record it unless the store had the result."""
    key = size = None
    if outcome is None:
        _LOG.info("failed after %s", figures.told())
    else:
        files, key = outcome.manifest.files, outcome.manifest.ingredients.key
        size = sum(entry.size for entry in files)
        how, took = (
            ("from the store", f"{figures.seconds:.1f} s")
            if outcome.from_store
            else ("built", figures.told())
        )
        TERMINAL.info("%s: %d files, %s bytes, %s", how, len(files), f"{size:,}", took)
    if outcome is None or not outcome.from_store:
        try:
            artifact = manifest.tree_path(options.output).name
            write_record(options.log, options.stage, artifact, figures, key, size)
        except OSError as problem:  # a full disk: the result is whole all the same
            _LOG.warning("what the job took is not recorded: %s", problem)


def execute(
    stage: str, inputs: dict[str, Path], params: dict[str, Any], output: Path, store: Store | None = None
) -> Outcome:
    """Build one result and its manifest, or take them from the store. The result is whole or not there at all.

    Two processes never make one result at the same time: an orphan of a killed run is waited for.
    """
    tree = manifest.tree_path(output)
    with alone(tree.with_name(f".{tree.name}.lock"), _say_waiting):
        hashes = HashMemory(hash_memory_path(output))
        digests = {name: input_digest(path, hashes) for name, path in sorted(inputs.items())}
        ingredients = ingredients_of(stage, digests, params, output)
        _LOG.info("stage %s, artifact %s, key %s", stage, tree.name, ingredients.key)
        _LOG.info("ingredients:\n%s", canonical_json(ingredients.__dict__))
        remove_stale_siblings(tree)
        output.unlink(missing_ok=True)  # from here on nothing may look whole until the new manifest is there
        stored = _fill(tree, stage, Job(_trees(inputs), digests, params, tree), ingredients, store)
        if stored is None:
            _refuse_changes(ingredients, inputs, params, output, hashes)
        stamps = manifest.stamp_files(tree)
        result = manifest.Manifest(ingredients, manifest.list_files(tree) if stored is None else stored)
        if store and stored is None:
            stamps = store.put(result, tree, stamps)
        manifest.record_manifest(tree, result, stamps)
        hashes.save({stamps[entry.path][1]: entry.sha256 for entry in result.files})
    for entry in result.files:
        _LOG.info("wrote %s, %d bytes, sha256 %s", entry.path, entry.size, entry.sha256)
    _LOG.info("%s; digest %s", "built" if stored is None else "from the store", result.digest)
    return Outcome(result, stored is not None)


def _fill(
    tree: Path, stage: str, job: Job, ingredients: manifest.Ingredients, store: Store | None
) -> list[manifest.FileEntry] | None:
    """Put the result's files in place; returns what the store knows of them, None where they were built.

    A gate that failed is raised only when its files are in place: its table is what the user needs to see.
    """
    verdict: GateFailed | None = None
    with new_tree(tree) as out:
        stored = store.fetch(ingredients, out) if store else None
        if stored is None:
            try:
                _run(stage, replace(job, out=out))
            except GateFailed as failed:
                verdict = failed
    if verdict is not None:
        raise verdict
    return stored


def _refuse_changes(
    before: manifest.Ingredients,
    inputs: dict[str, Path],
    params: dict[str, Any],
    output: Path,
    hashes: HashMemory,
) -> None:
    """Raise UserError if code or an input was edited while the stage ran: the result belongs to no key then.

    A part of the old and a part of the new may be in it, and the store would serve it for the old one.
    """
    digests = {name: input_digest(path, hashes) for name, path in sorted(inputs.items())}
    after = ingredients_of(before.stage, digests, params, output)
    if after != before:
        changed = [name for name in digests if digests[name] != before.inputs[name]]
        changed += sorted(
            path
            for path in before.code.keys() | after.code.keys()
            if before.code.get(path) != after.code.get(path)
        )
        raise UserError(f"{', '.join(changed) or 'a tool'} changed while the stage ran: run again")


def _say_waiting() -> None:
    TERMINAL.info("another process is making this result: waiting for it")


def ingredients_of(
    stage: str, digests: dict[str, str], params: dict[str, Any], output: Path
) -> manifest.Ingredients:
    """Everything that goes into a result, given the digests of its inputs."""
    return manifest.Ingredients(
        stage=stage,
        artifact=manifest.tree_path(output).name,
        code=closure.stage_code(stage),
        params=params,
        inputs=digests,
        tools=closure.stage_tools(stage),
        host=closure.stage_host(stage),
    )


def input_digest(path: Path, hashes: HashMemory) -> str:
    """Digest of an input's content: of a result by its checked manifest, of a plain file or folder by hashing."""
    if is_manifest(path):
        return manifest.verify_tree(path).identity
    if path.is_file():
        return sha256_text(canonical_json([[path.name, hashes.sha256(path)]]))
    if path.is_dir():
        return sha256_text(
            canonical_json(
                [[file.relative_to(path).as_posix(), hashes.sha256(file)] for file in tree_files(path)]
            )
        )
    raise UserError(f"{path} does not exist")


def is_manifest(path: Path) -> bool:
    """Whether an input stands for a result."""
    return path.name.endswith(manifest.SUFFIX)


def hash_memory_path(output: Path) -> Path:
    """Where a result's plain inputs are remembered (local, beside the result's stamp)."""
    return output.with_name(f".{manifest.tree_path(output).name}.inputs.json")


def _run(stage: str, job: Job) -> None:
    for name, path in job.inputs.items():
        _LOG.info("reads %s: %s", name, path)
    with paused_collection(), working(f"import stage {stage}"):
        module = importlib.import_module(f"workflow_scripts.stages.{stage}")
    module.run(job)


def _trees(inputs: dict[str, Path]) -> dict[str, Path]:
    """The folders that results among the inputs stand for, other inputs as they are."""
    return {name: manifest.tree_path(path) if is_manifest(path) else path for name, path in inputs.items()}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line of a stage."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts stage", description=__doc__)
    parser.add_argument("stage", help="a module of workflow_scripts/stages")
    parser.add_argument("--input", nargs="*", default=[], metavar="NAME=PATH", dest="inputs")
    parser.add_argument("--params", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--output", type=Path, required=True, metavar="MANIFEST")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument(
        "--store", metavar="FOLDER", help="the local store, or off; GEMMA4_STORE goes over it"
    )
    parser.add_argument("--shared-store", metavar="URL", help="GEMMA4_STORE_SHARED goes over it")
    options = parser.parse_args(arguments)
    pairs = [text.partition("=") for text in options.inputs]
    options.inputs = {name: Path(path) for name, _, path in pairs}
    return options


@contextmanager
def _logging_to(path: Path) -> Iterator[TextIO]:
    """Send logging and everything libraries print to the log file; yields the terminal's own stream."""
    with os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1) as terminal, path.open("w") as log:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", force=True
        )
        handler = logging.StreamHandler(terminal)
        handler.setFormatter(logging.Formatter(f"  {path.stem}: %(message)s"))
        TERMINAL.addHandler(handler)
        try:
            yield terminal
        finally:
            TERMINAL.removeHandler(handler)
            sys.stdout.flush()
            sys.stderr.flush()
