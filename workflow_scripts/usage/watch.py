"""What a job takes while it runs: seconds, peaks of memory of all its processes together, bytes written."""

import json
import logging
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

from workflow_scripts.usage import processes

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Figures:
    """What a job took; sizes in bytes, None where nobody counted.

    Anonymous memory is the largest sum over the job's processes in one sample. Resident is that or the highest mark of
    one process, whichever is more; pages of one file in two processes count twice.
    """

    seconds: float
    cpu_seconds: float
    written: int | None
    anonymous: int | None
    resident: int | None

    def told(self) -> str:
        """One line for people."""
        memory = [
            f"{'?' if size is None else mebibytes(size)} MiB {kind}"
            for size, kind in ((self.anonymous, "anonymous"), (self.resident, "resident"))
        ]
        return f"{self.seconds:.1f} s, peak of memory {', '.join(memory)}"


def mebibytes(size: int) -> int:
    """Bytes in MiB, to the nearest."""
    return round(size / 2**20)


class Watch:
    """Watches this process and all below it from its making until `stop`."""

    def __init__(self) -> None:
        self._start, self._cpu = time.monotonic(), _cpu_seconds()
        self._written = processes.written(os.getpid())
        # In a session of its own: what is sent to the job's group, such as Ctrl-C, leaves it its last word.
        try:
            self._sampler = subprocess.Popen(
                [sys.executable, "-m", "workflow_scripts.usage.sampler", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as problem:  # no reason to lose a result
            _LOG.warning("nobody watches the memory: %s", problem.strerror)
            self._sampler = None

    def stop(self) -> Figures:
        """End it; returns what was seen."""
        seconds, cpu_seconds = time.monotonic() - self._start, _cpu_seconds() - self._cpu
        now = processes.written(os.getpid())
        known = now is not None and self._written is not None
        return Figures(seconds, cpu_seconds, now - self._written if known else None, **self._peaks())

    def _peaks(self) -> dict[str, int | None]:
        unknown = {"anonymous": None, "resident": None}
        if self._sampler is None:
            return unknown
        try:
            answer, _ = self._sampler.communicate("stop\n")
            return json.loads(answer)
        except (OSError, ValueError):  # somebody ended it
            return unknown


def _cpu_seconds() -> float:
    """Of this process and of the children that were waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
