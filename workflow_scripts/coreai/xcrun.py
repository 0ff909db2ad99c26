"""Apple's command-line tools, by way of `xcrun`: here the Metal compiler."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT = 300  # seconds; a kernel compiles in less than one
_SHOWN = 5  # lines of a tool's errors
# What says that the tool is not there, whatever is compiled: xcrun's own errors, and those of its stand-ins.
_ABSENT = re.compile(r"^(xcrun: error: .*)|.*(missing Metal Toolchain|license agreement).*", re.MULTILINE)


class ToolMissing(Exception):
    """This host has no such tool; the message says which and what to do."""


@dataclass(frozen=True)
class Ran:
    """A tool that came to an end: None, or why it did not do what it was asked."""

    problem: str | None


def has_xcrun() -> bool:
    """Whether there is an `xcrun` at all."""
    return shutil.which("xcrun") is not None


def compile_metal(source: str, name: str) -> Ran:
    """Let the Metal compiler of macOS translate `source`, which its messages call `NAME.metal`.

    Raises ToolMissing where there is no Metal compiler.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}.metal").write_text(source, encoding="utf-8")
        return run_tool("macosx", "metal", ["-c", f"{name}.metal", "-o", f"{name}.air"], folder)


def run_tool(sdk: str, tool: str, arguments: list[str], folder: str) -> Ran:
    """Run a tool of an SDK in `folder`. Raises ToolMissing where xcrun does not find it."""
    command = ["xcrun", "-sdk", sdk, tool, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except FileNotFoundError:
        raise ToolMissing(f"no {tool} compiler: this host has no xcrun (it comes with Xcode)") from None
    except subprocess.TimeoutExpired:
        return Ran(f"{tool} did not end within {_TIMEOUT} s")
    said = done.stderr + done.stdout
    if done.returncode < 0:
        return Ran(f"{tool} died by {signal.Signals(-done.returncode).name}: {_errors(said)}")
    if done.returncode:
        absent = _ABSENT.search(said)
        if absent:
            raise ToolMissing(
                f"no {tool} compiler ({absent[0].strip()}): select an Xcode that has it with `xcode-select -s`, or "
                "fetch it with `xcodebuild -downloadComponent MetalToolchain`"
            )
        return Ran(_errors(said) if said.strip() else f"{tool} ended with code {done.returncode}")
    return Ran(None)


def _errors(said: str) -> str:
    """The lines that name errors, or the last ones."""
    lines = said.strip().splitlines()
    errors = [line.strip() for line in lines if "error" in line]
    return "; ".join(errors[:_SHOWN] or lines[-_SHOWN:]) or "it said nothing"
