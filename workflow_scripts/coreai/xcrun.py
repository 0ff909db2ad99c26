"""Apple's command-line tools, by way of `xcrun`: the Metal compiler and `coreai-build`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

COREAI_BUILD = "coreai-build"

_TIMEOUT = 300  # seconds; a kernel compiles in less than one
_LOOKING = 4  # seconds
_SHOWN = 5  # lines of a tool's errors
_NAMES = {"metal": "metal compiler"}  # tool -> what it is called where its name says too little
# What says that the tool is not there, whatever is compiled: xcrun's own errors, and those of its stand-ins.
_ABSENT = re.compile(
    r"^(xcrun: error: .*)|.*(missing Metal Toolchain|requires the Metal Toolchain|license agreement).*",
    re.MULTILINE,
)
_SIGNALS = {one.value: one.name for one in signal.Signals}
_SHELL_SIGNALS = 128  # a shell that ran the tool ends with this more than the signal it died by
_PAUSE = 0.02  # seconds between two looks at a tool at work


class ToolMissing(Exception):
    """This host has no such tool; the message says which and what to do."""


@dataclass(frozen=True)
class Ran:
    """A tool that came to an end.

    `problem` is None, or why it did not do what it was asked; `died_by` the signal's name where one ended it; `said`
    all it printed. `seconds` and `peak_bytes`, the most memory that was resident at once, are measured; on Linux the
    second is at least what the process that started the tool had (a stage: 24 MB).
    """

    problem: str | None
    died_by: str | None = None
    said: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0


def has_xcrun() -> bool:
    """Whether there is an `xcrun` at all."""
    return shutil.which("xcrun") is not None


def finds(tool: str) -> bool:
    """Whether xcrun finds a tool; it is not run. Some 10 ms, as xcrun remembers what it found."""
    if not has_xcrun():
        return False
    command = ["xcrun", "--find", tool]
    try:
        return subprocess.run(command, capture_output=True, timeout=_LOOKING, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def compile_metal(source: str, name: str) -> Ran:
    """Let the Metal compiler of macOS translate `source`, which its messages call `NAME.metal`.

    Raises ToolMissing where there is no Metal compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.metal").write_text(source, encoding="utf-8")
        return run_tool("metal", ["-c", f"{name}.metal", "-o", f"{name}.air"], folder, sdk="macosx")


def run_tool(
    tool: str,
    arguments: list[str],
    folder: str | Path,
    *,
    sdk: str | None = None,
    temporary: Path | None = None,
    timeout: float = _TIMEOUT,
    at_work: Callable[[float], None] = lambda seconds: None,
) -> Ran:
    """Run a tool in `folder`, killing it after `timeout` seconds. Raises ToolMissing where xcrun does not find it.

    `temporary` is where it is to put what it needs for a while; `at_work` is called with the seconds that have passed,
    many times a second.
    """
    if not has_xcrun():
        raise ToolMissing(f"no {_name(tool)}: this host has no xcrun (it comes with Xcode)")
    command = ["xcrun", *(["-sdk", sdk] if sdk else []), tool, *arguments]
    environment = os.environ | {"LC_ALL": "C"} | ({"TMPDIR": str(temporary)} if temporary else {})
    with tempfile.TemporaryFile() as printed:  # a pipe would have to be emptied while the tool is watched
        start = time.monotonic()
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        in_time, peak = _watch(child, start, timeout, at_work)
        seconds = time.monotonic() - start
        printed.seek(0)
        said = printed.read().decode(errors="replace")
    died_by = _signal_of(child.returncode) if in_time else None
    problem = _problem(tool, child.returncode, died_by, said) if in_time else _too_long(tool, timeout)
    return Ran(problem, died_by, said, seconds, peak)


def _watch(
    child: subprocess.Popen, start: float, timeout: float, at_work: Callable[[float], None]
) -> tuple[bool, int]:
    """Wait for a child, or kill it; returns whether it ended by itself, and its peak of resident memory in bytes."""
    in_time = True
    try:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                child.returncode = os.waitstatus_to_exitcode(status)
                return in_time, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            seconds = time.monotonic() - start
            if in_time and seconds > timeout:
                in_time = False
                os.kill(child.pid, signal.SIGKILL)  # Popen.kill could reap it, and its memory were unknown
            at_work(seconds)
            time.sleep(_PAUSE)
    finally:
        if child.returncode is None:  # this process is being stopped
            child.kill()
            child.wait()


def _signal_of(code: int) -> str | None:
    """Name of the signal that ended a tool, or one that it ran, by its exit code."""
    return _SIGNALS.get(-code if code < 0 else code - _SHELL_SIGNALS)


def _problem(tool: str, code: int, died_by: str | None, said: str) -> str | None:
    """What an exit code and what was printed come to. Raises ToolMissing."""
    if died_by:
        return f"{tool} died by {died_by}: {_errors(said)}"
    if code == 0:
        return None
    absent = _ABSENT.search(said)
    if absent:
        raise ToolMissing(
            f"no {_name(tool)} ({absent[0].strip()}): select an Xcode that has it with `xcode-select -s`, or "
            "fetch it with `xcodebuild -downloadComponent MetalToolchain`"
        )
    return _errors(said) if said.strip() else f"{tool} ended with code {code}"


def _too_long(tool: str, timeout: float) -> str:
    return f"{tool} did not end within {timeout:g} s"


def _name(tool: str) -> str:
    return _NAMES.get(tool, tool)


def _errors(said: str) -> str:
    """The lines that name errors, or the last ones."""
    lines = said.strip().splitlines()
    errors = [line.strip() for line in lines if "error" in line]
    return "; ".join(errors[:_SHOWN] or lines[-_SHOWN:]) or "it said nothing"
