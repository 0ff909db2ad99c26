"""What the jobs of a workflow inherit."""

import os
import sys
from pathlib import Path


def share_with_jobs(root: Path) -> None:
    """Let child processes run this Python and find the package in `root` from any working directory.

    Put in front of what is set already, so that an activated conda environment, which comes later, still wins.
    """
    for name, first in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", root)):
        os.environ[name] = os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))
