"""What works on this host and what will not: `python -m workflow_scripts doctor`.

It only looks: nothing is installed, fetched or changed, and no secret is read or printed.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = ROOT / "envs" / "requirements.txt"
RESULTS = ROOT / "results"

_OLDEST, _NEWEST = (3, 11), (3, 14)  # Pythons that coreai-core has wheels for
_GB = 1e9
# The embedded model and, below "full", Gemma 4 E2B: the checkpoint, three sizes of core, tables, folders.
_MEMORY_NEEDED, _MEMORY_FULL = 3 * _GB, 16 * _GB
_DISK_NEEDED, _DISK_FULL = 2 * _GB, 70 * _GB


@dataclass(frozen=True)
class Finding:
    """One row of the table. `status` is ok, warn (the Linux pipeline works without) or missing."""

    status: str
    subject: str
    found: str
    advice: str = ""


def main(arguments: list[str]) -> int:
    """Print the table; 0 if everything the pipeline needs on Linux is there, else 1."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts doctor", description=__doc__)
    parser.parse_args(arguments)
    findings = list(examine(os.environ))
    print("\n".join(table(findings)))
    return int(any(finding.status == "missing" for finding in findings))


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Look at everything, the host first and the pinned packages last."""
    yield _system(platform.system(), platform.machine())
    yield _python(sys.version_info[:3])
    yield _compiler(environment)
    yield _memory(memory_bytes())
    yield _disk(RESULTS)
    yield _git()
    yield _hub_cache(environment)
    yield _hub_token(environment)
    yield _xcode()
    yield from packages(read_pins(PINS))


def table(findings: list[Finding]) -> list[str]:
    """The findings as lines of text, then what to do, then one line of summary."""
    width = max(len(finding.subject) for finding in findings)
    lines = [f"{finding.status:8}{finding.subject:{width}}  {finding.found}" for finding in findings]
    advice = dict.fromkeys(  # one piece of advice may answer several rows
        finding.advice for status in ("missing", "warn") for finding in findings if finding.status == status
    )
    missing = [finding.subject for finding in findings if finding.status == "missing"]
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    summary = f"not ready: {', '.join(missing[:5])}{more}" if missing else "ready"
    return [*lines, "", *(f"- {text}" for text in advice if text), summary]


def read_pins(path: Path) -> dict[str, str]:
    """Package -> version from a requirements file of `name==version` lines."""
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(pairs)


def packages(pins: dict[str, str]) -> Iterator[Finding]:
    """Compare each pinned package with the installed one; a build tag such as +cpu is no difference."""
    for name, pinned in pins.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("missing", name, f"not installed, {pinned} is pinned", _INSTALL)
            continue
        if installed.partition("+")[0] == pinned:
            yield Finding("ok", name, installed)
        else:
            yield Finding("missing", name, f"{installed} is installed, {pinned} is pinned", _INSTALL)


_INSTALL = "packages differ from envs/requirements.txt: run `make environment` and use .venv/bin/python"


def _system(system: str, machine: str) -> Finding:
    found = f"{system} {machine}"
    if system in ("Linux", "Darwin"):
        return Finding("ok", "system", found)
    return Finding("missing", "system", found, "use Linux or macOS (on Windows: WSL)")


def _python(version: tuple[int, ...]) -> Finding:
    found = ".".join(map(str, version))
    if _OLDEST <= version[:2] <= _NEWEST:
        return Finding("ok", "Python", found)
    return Finding(
        "missing", "Python", found, "use Python 3.11 to 3.14: `make environment PYTHON=python3.13`"
    )


def _compiler(environment: Mapping[str, str]) -> Finding:
    for name in (environment.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return Finding("ok", "C++ compiler", _first_line([name, "--version"]) or name)
    advice = (
        "install a C++ compiler: apt install g++, dnf install gcc-c++, or on a Mac xcode-select --install"
    )
    return Finding("missing", "C++ compiler", "none of c++, g++, clang++", advice)


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _memory(size: int) -> Finding:
    found = f"{size / _GB:.1f} GB"
    if size < _MEMORY_NEEDED:
        return Finding("missing", "memory", found, "the oracle and exports need 3 GB: use a larger machine")
    if size < _MEMORY_FULL:
        return Finding(
            "warn", "memory", found, "Gemma 4 E2B needs 16 GB for its oracle; the embedded model runs"
        )
    return Finding("ok", "memory", found)


def _disk(results: Path) -> Finding:
    free = shutil.disk_usage(_existing(results)).free
    found = f"{free / _GB:.1f} GB free at {results.name}/"
    if not _writable(results):
        return Finding(
            "missing", "disk", f"{results.name}/ is not writable", "make results/ writable for you"
        )
    if free < _DISK_NEEDED:
        return Finding("missing", "disk", found, "free 2 GB at results/, or make it a link to a larger disk")
    if free < _DISK_FULL:
        return Finding("warn", "disk", found, "Gemma 4 E2B needs about 70 GB free; the embedded model fits")
    return Finding("ok", "disk", found)


def _git() -> Finding:
    if shutil.which("git"):
        return Finding("ok", "git", _first_line(["git", "--version"]))
    return Finding("warn", "git", "not found", "install git to work on the code; building does without")


def _hub_cache(environment: Mapping[str, str]) -> Finding:
    folder = Path(environment.get("HF_HUB_CACHE") or _hub_home(environment) / "hub")
    if _writable(folder):
        return Finding("ok", "Hugging Face cache", f"{folder} is writable")
    advice = "the Hub cache cannot be written: set HF_HOME to a folder that can, or use a local checkpoint"
    return Finding("warn", "Hugging Face cache", f"{folder} is not writable", advice)


def _hub_token(environment: Mapping[str, str]) -> Finding:
    """Only whether there is a token; its text is never read from a file, let alone shown."""
    named = environment.get("HF_TOKEN") or environment.get("HUGGING_FACE_HUB_TOKEN")
    file = Path(environment.get("HF_TOKEN_PATH") or _hub_home(environment) / "token")
    found = "present" if named or _has_bytes(file) else "none; public repositories need none"
    return Finding("ok", "Hugging Face token", found)


def _hub_home(environment: Mapping[str, str]) -> Path:
    """Folder that huggingface_hub keeps its cache and token in."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("HF_HOME") or cache / "huggingface").expanduser()


def _xcode() -> Finding:
    consequence = "no AOT compile and no GPU or ANE runs here: those need a Mac with Xcode 27; all else works"
    if shutil.which("xcrun") is None:
        return Finding("warn", "xcrun coreai-build", "no Xcode on this host", consequence)
    version = _first_line(["xcrun", "coreai-build", "--version"])
    if version:
        return Finding("ok", "xcrun coreai-build", version)
    advice = f"{consequence}. On a Mac, select it: sudo xcode-select -s /Applications/Xcode.app"
    return Finding("warn", "xcrun coreai-build", "this Xcode has none", advice)


def _first_line(command: list[str]) -> str:
    """First line a tool prints, or an empty text if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def _existing(path: Path) -> Path:
    """The path itself or its nearest folder that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _writable(folder: Path) -> bool:
    """Whether the folder can be written, or made where it does not exist yet."""
    home = _existing(folder)
    return home.is_dir() and os.access(home, os.W_OK | os.X_OK)


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
