"""What the jobs of a workflow inherit."""

import os
import shlex
import sys
from pathlib import Path

from workflow_scripts.config import StoreConfig


def share_with_jobs(root: Path) -> None:
    """Let child processes run this Python and find the package in `root` from any working directory.

    Put in front of what is set already, so that an activated conda environment, which comes later, still wins.
    """
    for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", root)):
        os.environ[name] = os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))


def store_arguments(store: StoreConfig) -> str:
    """The end of a stage's command line that names the store, in Snakemake's shell syntax."""
    named = {"--store": store.folder, "--shared-store": store.shared}
    text = "".join(f" {option} {shlex.quote(place)}" for option, place in named.items() if place)
    return text.replace("{", "{{").replace("}", "}}")
