"""The process that watches a job's memory: `python -m workflow_scripts.usage.sampler PID [SECONDS]`.

A process and no thread, since a library can hold the interpreter's lock for long (6 s in the export of a full-size
decoder, measured), and that is where memory grows. It ends with its job: a line on stdin, or the end of it, stops it.
"""

import json
import os
import select
import sys

from workflow_scripts.usage import processes

_INTERVAL = 0.1  # seconds between two samples


def main(pid: int, interval: float) -> None:
    """Sample until stopped; then print the peaks in bytes as JSON."""
    anonymous = resident = 0
    stopped = False
    while not stopped:
        stopped = bool(select.select([sys.stdin], [], [], interval)[0])
        family = [member for member in processes.family(pid) if member != os.getpid()]
        seen = [one for member in family if (one := processes.memory(member))]
        anonymous = max(anonymous, sum(one.anonymous for one in seen))
        highest = [one.highest for one in seen if one.highest is not None]
        resident = max(resident, sum(one.resident for one in seen), *highest)
    if sys.stdin.readline():  # else the job was killed, and nobody listens
        print(json.dumps({"anonymous": anonymous, "resident": resident}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else _INTERVAL)
