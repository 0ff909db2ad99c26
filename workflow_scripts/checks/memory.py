"""Peak of anonymous memory of a part of a benchmark, watched as a stage's is (see `usage`), only more often."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from workflow_scripts.usage import processes

_INTERVAL = 0.005  # seconds


class PeakMemory:
    """`bytes`: the peak above what the process had at first; None where the system does not tell."""

    bytes: int | None = None


@contextmanager
def peak_anonymous() -> Iterator[PeakMemory]:
    """Watch this process and its children for the time of the block; the peak is there after it."""
    peak, own = PeakMemory(), os.getpid()
    before = processes.memory(own)
    command = [sys.executable, "-m", "workflow_scripts.usage.sampler", str(own), str(_INTERVAL)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        yield peak
        answer, _ = sampler.communicate("stop\n")
    if before is not None:
        peak.bytes = max(json.loads(answer)["anonymous"] - before.anonymous, 0)
