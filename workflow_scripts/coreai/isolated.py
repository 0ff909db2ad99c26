"""Run a function that touches a bundle in a child process: a damaged program aborts the process that loads it."""

import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.collection import paused_collection
from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL

Arrays = dict[str, np.ndarray]
_LOG = logging.getLogger(__name__)
_FOR_TERMINAL = "[terminal] "  # how the child marks progress that its parent passes on
# Exit code of a child whose function raised UserError; its message is the last line on stderr.
_USER_ERROR = 3
_LITTLE_SPACE = 64 << 20


class ChildDied(UserError):
    """The child process ended by a signal or an internal error: the bundle is damaged or the runtime failed."""


def isolated(function: Callable[..., Arrays], **arguments: Any) -> Arrays:
    """Call a module-level function with JSON arguments in a child process and return its arrays.

    Raises ChildDied with the cause where the child did not come to its end, UserError where the function raised it.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "arrays.npz"
        call = [function.__module__, function.__name__, json.dumps(arguments), str(result)]
        command = [sys.executable, "-m", "workflow_scripts.coreai.isolated", *call]
        lines = ["it said nothing"]
        # What the child puts there is gone with the folder, also when the child dies.
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(
            command, env=environment, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as child:
            for line in map(str.rstrip, child.stderr):
                for_terminal = line.startswith(_FOR_TERMINAL)
                (TERMINAL if for_terminal else _LOG).info("%s", line.removeprefix(_FOR_TERMINAL))
                lines.append(line or lines[-1])
        if child.returncode == _USER_ERROR:
            raise UserError(lines[-1])
        if child.returncode < 0:
            name = signal.Signals(-child.returncode).name
            # The runtime maps a lowered copy of the bundle from there; a full disk then is a SIGBUS.
            free = shutil.disk_usage(tempfile.gettempdir()).free
            full = (
                f" (only {free:,} bytes are free in {tempfile.gettempdir()})" if free < _LITTLE_SPACE else ""
            )
            raise ChildDied(f"the process that ran the bundle died by {name}: {lines[-1]}{full}")
        if child.returncode:
            raise ChildDied(f"the process that ran the bundle failed: {lines[-1]}")
        with np.load(result) as arrays:
            return dict(arrays)


def main(arguments: list[str]) -> int:
    """The child's side: MODULE FUNCTION JSON RESULT."""
    module, name, parameters, result = arguments
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{_FOR_TERMINAL}%(message)s"))
    TERMINAL.addHandler(handler)
    TERMINAL.propagate = False
    try:
        with paused_collection():
            function = getattr(importlib.import_module(module), name)
        arrays = function(**json.loads(parameters))
    except UserError as problem:
        print(str(problem).replace("\n", " "), file=sys.stderr)
        return _USER_ERROR
    with Path(result).open("wb") as stream:
        np.savez(stream, **arrays)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # No interpreter shutdown: a thread of the runtime that wants the interpreter's lock in that moment is ended by
    # forced unwinding, which its Swift frames answer with SIGABRT (seen about once in a hundred runs on a busy host).
    os._exit(code)
