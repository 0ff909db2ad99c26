"""The one runner of every stage: arguments, log, key, atomic result, manifest.

A rule calls `python -m workflow_scripts stage NAME --input name=path ... --params JSON --output MANIFEST --log FILE`.
An input that is a manifest stands for its result folder, which is checked before it is read; any other input is
a plain file or folder, whose content is hashed. The stage's module has one function `run(job)`, which
reads `job.inputs` and `job.params` and fills the empty folder `job.out`.
"""

import argparse
import importlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from workflow_scripts import closure, manifest
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.files import canonical_json, new_tree, sha256_file, sha256_text
from workflow_scripts.progress import TERMINAL

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """What a stage's `run` is given.

    `inputs` maps a name to a result folder (already checked) or to a plain file or folder; `digests` holds the
    digest of each; `params` is the rule's JSON; `out` is an empty folder, named as the artifact, to fill.
    """

    inputs: dict[str, Path]
    digests: dict[str, str]
    params: dict[str, Any]
    out: Path


def main(arguments: list[str]) -> int:
    """Run one stage from its command line; returns the exit code."""
    options = _parse(arguments)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    title = f"{options.stage} {manifest.tree_path(options.output).name}"
    with _logging_to(options.log) as terminal:
        try:
            start = time.monotonic()
            result = execute(options.stage, options.inputs, options.params, options.output)
            size = sum(entry.size for entry in result.files)
            TERMINAL.info(
                "%d files, %s bytes, %.1f s", len(result.files), f"{size:,}", time.monotonic() - start
            )
            return 0
        except UserError as problem:
            print(f"{title}: error: {problem}", file=terminal)
            _LOG.error("%s", problem)
        except OSError as problem:
            print(f"{title}: error: {problem.strerror or problem}: {problem.filename or ''}", file=terminal)
            _LOG.error("%s", traceback.format_exc())
        except Exception as problem:
            print(f"{title}: internal error: {problem!r}; the traceback is in {options.log}", file=terminal)
            _LOG.error("%s", traceback.format_exc())
    return 1


def execute(stage: str, inputs: dict[str, Path], params: dict[str, Any], output: Path) -> manifest.Manifest:
    """Build one result and its manifest; returns the manifest. The result is whole or not there at all."""
    digests = {name: _input_digest(path) for name, path in sorted(inputs.items())}
    tree = manifest.tree_path(output)
    ingredients = manifest.Ingredients(
        stage=stage,
        artifact=tree.name,
        code=closure.stage_code(stage),
        params=params,
        inputs=digests,
        tools=closure.stage_tools(stage),
    )
    _LOG.info("stage %s, artifact %s, key %s", stage, tree.name, ingredients.key)
    _LOG.info("ingredients:\n%s", canonical_json(ingredients.__dict__))
    trees = {name: manifest.tree_path(p) if _is_manifest(p) else p for name, p in inputs.items()}
    for name, path in trees.items():
        _LOG.info("reads %s: %s", name, path)
    run = importlib.import_module(f"workflow_scripts.stages.{stage}").run
    output.unlink(missing_ok=True)  # from here on nothing may look whole until the new manifest is there
    verdict: GateFailed | None = None
    with new_tree(tree) as out:
        try:
            run(Job(trees, digests, params, out))
        except GateFailed as failed:  # its table is what the user needs to see: keep it, without a manifest
            verdict = failed
    if verdict is not None:
        raise verdict
    result = manifest.write_manifest(tree, ingredients)
    for entry in result.files:
        _LOG.info("wrote %s, %d bytes, sha256 %s", entry.path, entry.size, entry.sha256)
    _LOG.info("digest %s", result.digest)
    return result


def _is_manifest(path: Path) -> bool:
    return path.name.endswith(manifest.SUFFIX)


def _input_digest(path: Path) -> str:
    """Digest of an input's content: of a result by its checked manifest, of a plain file or folder by hashing."""
    if _is_manifest(path):
        return manifest.verify_tree(path).digest
    if path.is_file():
        return sha256_text(canonical_json([[path.name, sha256_file(path)]]))
    if path.is_dir():
        return sha256_text(
            canonical_json([[entry.path, entry.sha256] for entry in manifest.list_files(path)])
        )
    raise UserError(f"{path} does not exist")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts stage", description=__doc__)
    parser.add_argument("stage", help="a module of workflow_scripts/stages")
    parser.add_argument("--input", nargs="*", default=[], metavar="NAME=PATH", dest="inputs")
    parser.add_argument("--params", type=json.loads, default={}, metavar="JSON")
    parser.add_argument("--output", type=Path, required=True, metavar="MANIFEST")
    parser.add_argument("--log", type=Path, required=True)
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
