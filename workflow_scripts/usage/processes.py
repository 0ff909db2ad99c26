"""Memory and bytes written of a process and of all that it started, as the operating system counts them.

Linux: `/proc/<pid>/status`. *Anonymous* is RssAnon with what of it lies in swap: memory that has no file behind it, so
that a host must have it. *Resident* (VmRSS) also counts pages of mapped files, which a host can take back.
macOS: `proc_pid_rusage`. *Anonymous* is the physical footprint, which is what Activity Monitor calls memory: it counts
compressed pages and some of the graphics driver's as well, so it is a little more than RssAnon would be.
"""

import ctypes
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_RUSAGE_INFO_V2 = 2  # libproc.h
# Places in `struct rusage_info_v2` behind its uuid of 16 bytes, in units of 8 bytes.
_RESIDENT, _FOOTPRINT, _DISK_WRITTEN, _FIELDS = 6, 7, 17, 18


@dataclass(frozen=True)
class Memory:
    """One process in one moment, in bytes; `highest` is the most that was ever resident, None where nobody knows."""

    anonymous: int
    resident: int
    highest: int | None


def how_measured() -> str:
    """What the figures of this platform are, in one line."""
    if sys.platform == "darwin":
        return "physical footprint and resident size by proc_pid_rusage, sampled"
    if sys.platform.startswith("linux"):
        return "RssAnon with VmSwap, sampled; resident: VmRSS, sampled, and VmHWM of each process"
    return "USS and RSS by psutil, sampled"


def family(pid: int) -> Iterator[int]:
    """A process and everything below it; whatever ends meanwhile is left out."""
    yield pid
    for child in _children(pid):
        yield from family(child)


def memory(pid: int) -> Memory | None:
    """What a process holds now; None where it has ended or belongs to somebody else."""
    try:
        if sys.platform.startswith("linux"):
            return _linux(pid)
        if sys.platform == "darwin":
            fields = _rusage(pid)
            return Memory(fields[_FOOTPRINT], fields[_RESIDENT], None) if fields else None
        return _portable(pid)
    except OSError:
        return None


def written(pid: int) -> int | None:
    """Bytes that a process made dirty or wrote to disk so far, with its ended children; None where nobody counts.

    A link or clone writes nothing. Linux counts nothing for a file system in memory; macOS leaves the children out.
    """
    try:
        if sys.platform.startswith("linux"):
            text = (_PROC / str(pid) / "io").read_text()
            return int(text.partition("\nwrite_bytes:")[2].split()[0])
        if sys.platform == "darwin":
            fields = _rusage(pid)
            return fields[_DISK_WRITTEN] if fields else None
    except (OSError, IndexError):
        pass
    return None


def _children(pid: int) -> list[int]:
    """Pids of the direct children."""
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        tasks = []
    found: list[int] = []
    for task in tasks:
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            if task.is_dir():  # a kernel that does not list children
                break
        except OSError:  # the thread ended
            continue
    else:
        if tasks:
            return found
    import psutil  # not at the top: this module's start is a part of every job, and Linux rarely comes here

    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _portable(pid: int) -> Memory | None:
    import psutil  # as above

    try:
        info = psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None
    return Memory(info.uss, info.rss, None)


def _linux(pid: int) -> Memory | None:
    fields = {}
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "VmSwap", "VmRSS", "VmHWM"):
            fields[name] = int(value.split()[0]) * 1024
    if "VmRSS" not in fields:  # a process that has ended and was not waited for yet
        return None
    return Memory(fields["RssAnon"] + fields.get("VmSwap", 0), fields["VmRSS"], fields["VmHWM"])


@functools.cache
def _libproc() -> ctypes.CDLL:
    return ctypes.CDLL("/usr/lib/libproc.dylib")


def _rusage(pid: int) -> list[int] | None:
    """The counters of macOS's `rusage_info_v2`."""
    block = (ctypes.c_uint64 * (2 + _FIELDS))()
    if _libproc().proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(block)) != 0:
        return None
    return list(block)[2:]
