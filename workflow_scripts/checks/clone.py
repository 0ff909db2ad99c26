"""A second copy of the project to build in, as a fresh checkout would be."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError


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
    project: Path, *arguments: str, umask: int = -1, environment: Mapping[str, str] | None = None
) -> str:
    """Run Snakemake in a copy; returns what it printed. Raises UserError with its last lines where it failed."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments],
        cwd=project,
        env=inherited | dict(environment or {}),
        umask=umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if run.returncode:
        tail = "\n".join(run.stdout.splitlines()[-30:])
        raise UserError(f"`snakemake {' '.join(arguments)}` failed in {project}:\n{tail}")
    return run.stdout
