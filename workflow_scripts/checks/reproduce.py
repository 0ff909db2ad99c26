"""`make reproduce`: two clean builds on hosts as different as one machine allows must give the same `SHA256SUMS`.

They differ in folder, number of jobs, umask, locale, time zone and hash seed, and use no store.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.checks.compare import where
from workflow_scripts.errors import UserError


@dataclass(frozen=True)
class Host:
    """How one of the two builds is run."""

    folder: str
    jobs: int
    umask: int
    environment: dict[str, str]


HOSTS = (
    Host("first", 2, 0o022, {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0"}),
    Host("a sécond", 3, 0o077, {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "4711"}),
)


def main() -> int:
    """Build twice and compare; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="reproduce-") as home:
        releases = [_build(Path(home), host) for host in HOSTS]
        difference = first_difference(*releases)
        files = len((releases[0] / "SHA256SUMS").read_text().splitlines())
    if difference:
        print(f"not reproducible: {difference}", file=sys.stderr)
        return 1
    print(f"reproducible: {files} files and SHA256SUMS itself are equal in both builds")
    return 0


def first_difference(one: Path, other: Path) -> str | None:
    """The first file of two releases that differs, and where; None where `SHA256SUMS` are equal."""
    sums = [_sums(release) for release in (one, other)]
    if (one / "SHA256SUMS").read_bytes() == (other / "SHA256SUMS").read_bytes():
        return None
    for name in sorted(sums[0].keys() | sums[1].keys()):
        if name not in sums[0] or name not in sums[1]:
            return f"{name} is in one build only"
        if sums[0][name] != sums[1][name]:
            return f"{name} differs {where(one / name, other / name)}"
    return "SHA256SUMS differ in their form only"


def _build(home: Path, host: Host) -> Path:
    project = home / host.folder
    copy_project(project)
    start = time.monotonic()
    print(
        f"building in {host.folder!r} with -j{host.jobs}, umask {host.umask:03o}, {host.environment}",
        flush=True,
    )
    environment = host.environment | {"GEMMA4_STORE": "off"}
    build(project, f"-j{host.jobs}", "release", umask=host.umask, environment=environment)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    (release,) = project.glob("results/*/release")
    return release


def _sums(release: Path) -> dict[str, str]:
    lines = (release / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as problem:
        sys.exit(f"error: {problem}")
