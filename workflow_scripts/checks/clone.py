"""A second copy of the project to build in, as a fresh checkout would be."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError

_ENDING = 10  # seconds that Snakemake may take to stop its jobs


def copy_project(target: Path) -> None:
    """Copy every file that git tracks or would track, with the changes that are not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        raise UserError(f"{ROOT} is no git checkout: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():  # deleted, but not committed yet
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def build(
    project: Path,
    *arguments: str,
    umask: int = -1,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = lambda line: None,
) -> str:
    """Run Snakemake in a copy; returns what it printed, and calls `on_line` with each line as it comes.

    Raises UserError with its last lines where it failed.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=project,
        env=inherited | dict(environment or {}),
        umask=umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as run:
        try:
            for line in run.stdout or ():
                lines.append(line)
                on_line(line.rstrip("\n"))
            run.wait()
        finally:
            _end(run)
    if run.returncode:
        tail = "".join(lines[-30:]).rstrip()
        raise UserError(f"`snakemake {' '.join(arguments)}` failed in {project}:\n{tail}")
    return "".join(lines)


def _end(run: subprocess.Popen) -> None:
    """Let Snakemake stop its jobs where this process is interrupted, since the copy may be deleted next.

    A terminal has interrupted it, too; where it was not, it is now.
    """
    for stop in (partial(run.send_signal, signal.SIGINT), run.kill):
        try:
            run.wait(_ENDING)
        except subprocess.TimeoutExpired:
            stop()
