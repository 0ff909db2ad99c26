"""`compile.sh` of a release: ahead-of-time compilation for people with Xcode and nothing else.

It repeats in a shell what stage `aot` does, without Python: the same call, and what tells that its result is right.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from workflow_scripts.closure import data_file
from workflow_scripts.coreai.architectures import Target, devices_of

_FUNCTIONS = data_file(__file__, "compile.sh")


@dataclass(frozen=True)
class CompileJob:
    """One call of the compiler: a bundle by its path in the release, and what it is compiled for."""

    bundle: str
    target: Target


def compile_script(jobs: Sequence[CompileJob]) -> str:
    """The script's text (POSIX sh). ValueError where there is nothing to compile, or two results of one name."""
    if not jobs:
        raise ValueError("there is nothing to compile")
    for job in jobs:
        path = PurePosixPath(job.bundle)
        if path.suffix != ".aimodel" or path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
            raise ValueError(f"{job.bundle} is no path of a bundle in a folder of the release")
    results = [(job.bundle, job.target.architecture) for job in jobs]
    if len(set(results)) < len(results):
        raise ValueError("a bundle is compiled twice for one architecture: the results would share a name")
    calls = "".join(_call(job) for job in sorted(jobs, key=lambda job: (job.bundle, job.target.architecture)))
    return f"{_FUNCTIONS.read_text(encoding='utf-8')}{calls}finish\n"


def _call(job: CompileJob) -> str:
    target = job.target
    words = [
        "compile",
        job.bundle,
        target.platform,
        target.architecture,
        target.preferred_compute,
        target.min_deployment_version,
        *(["--expect-frequent-reshapes"] if target.expect_frequent_reshapes else []),
    ]
    devices = ", ".join(devices_of(target))
    return f"{shlex.join(words)}{f' # {devices}' if devices else ''}\n"
