"""Peak of a process's anonymous memory, which a host must have: pages of mapped files it can take back.

Watched from a process of its own: a long call into a library may hold the interpreter's lock.
"""

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ANONYMOUS = re.compile(r"RssAnon:\s+(\d+) kB")
_INTERVAL = 0.005  # seconds


class PeakMemory:
    """`bytes`: the peak above what the process had at first; None where the system does not tell (all but Linux)."""

    bytes: int | None = None


@contextmanager
def peak_anonymous() -> Iterator[PeakMemory]:
    """Watch this process for the time of the block; the peak is there after it."""
    peak = PeakMemory()
    if not Path("/proc/self/status").is_file():
        yield peak
        return
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        before = int(watcher.stdout.readline())
        yield peak
        most, _ = watcher.communicate()
    peak.bytes = max(int(most) - before, 0)


def _watch(process: str) -> None:
    """Print the anonymous bytes now, and their peak when stdin is closed."""
    status = Path("/proc") / process / "status"
    most = _anonymous(status)
    print(most, flush=True)
    while not select.select([sys.stdin], [], [], _INTERVAL)[0]:
        most = max(most, _anonymous(status))
    print(max(most, _anonymous(status)))


def _anonymous(status: Path) -> int:
    return int(_ANONYMOUS.search(status.read_text())[1]) << 10


if __name__ == "__main__":
    _watch(sys.argv[1])
