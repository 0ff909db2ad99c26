"""Compile a bundle ahead of time with `xcrun coreai-build`; what comes out is checked by `compiled`."""

import logging
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.coreai.architectures import Target, compiled_name, own_problems
from workflow_scripts.coreai.compiled import check_contents, files_with, inspect, resources_verdict
from workflow_scripts.coreai.xcrun import COREAI_BUILD, Ran, ToolMissing, run_tool
from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL

FORMAT = 1

_LIMIT = 2 * 3600.0  # seconds; seven minutes were published for 2.7 GB on the Neural Engine
_SAY_EVERY = 60.0  # seconds
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|out of (disk )?space", re.IGNORECASE)
_LITTLE_SPACE = 64 << 20
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A bundle that was compiled and found right: what to record of it, and what was measured on this host."""

    record: dict[str, Any]
    seconds: float
    peak_bytes: int


def command(bundle: str, output: str, target: Target) -> list[str]:
    """The call that compiles a bundle, which is named from its own folder, into another folder."""
    hints = ["--expect-frequent-reshapes"] if target.expect_frequent_reshapes else []
    return [
        *("xcrun", COREAI_BUILD, "compile", bundle, "--output", output, "--platform", target.platform),
        *("--architecture", target.architecture, "--preferred-compute", target.preferred_compute),
        *("--min-deployment-version", target.min_deployment_version, *hints),
    ]


def compile_bundle(bundle: Path, target: Target, out: Path, timeout: float = _LIMIT) -> Compiled:
    """Compile `STEM.aimodel` into `out / STEM.ARCHITECTURE.aimodelc`.

    Raises UserError naming the bundle, what happened and what to do; then `out` is as it was.
    """
    problems = own_problems(target)
    if problems:
        raise UserError(f"{bundle.name} cannot be compiled for {target}: {'; '.join(problems)}")
    if bundle.suffix != ".aimodel" or not bundle.is_dir():
        raise UserError(f"{bundle} is no .aimodel folder: only such bundles are compiled ahead of time")
    what = f"{bundle.name} for {target}"
    with tempfile.TemporaryDirectory(dir=out, prefix=".compile-") as home:
        written, temporary = Path(home) / "written", Path(home) / "temporary"
        written.mkdir()
        temporary.mkdir()
        ran = _run(bundle, target, written, temporary, timeout)
        _check_end(ran, what, out)
        compiled = _output(written, compiled_name(bundle.stem, target), what)
        contents = inspect(compiled, target.architecture, what)
        check_contents(contents, target, what, ran.said)
        record = {
            "format": FORMAT,
            "bundle": bundle.name,
            "compiled": compiled.name,
            "target": asdict(target),
            "command": command(bundle.name, ".", target),
            "tool": _version(),
            "exit_code": 0,
            **asdict(contents),
            "resources_verdict": resources_verdict(contents.resources_bytes),
            "files_with_local_paths": files_with(compiled, [bundle.parent.resolve(), Path(home).resolve()]),
        }
        compiled.rename(out / compiled.name)
    return Compiled(record, ran.seconds, ran.peak_bytes)


def _run(bundle: Path, target: Target, written: Path, temporary: Path, timeout: float) -> Ran:
    """Run the compiler beside the bundle, so that it is given as few of this machine's paths as can be."""
    arguments = command(bundle.name, str(written.resolve()), target)[2:]
    said_at = _SAY_EVERY

    def say(seconds: float) -> None:
        nonlocal said_at
        if seconds >= said_at:
            said_at += _SAY_EVERY
            TERMINAL.info("compiling for %s, %d s so far", target, seconds)

    try:
        ran = run_tool(
            COREAI_BUILD,
            arguments,
            bundle.parent,
            temporary=temporary.resolve(),
            timeout=timeout,
            at_work=say,
        )
    except ToolMissing as missing:
        raise UserError(
            f"{bundle.name} cannot be compiled for {target}: {missing}; or set aot.mode to `auto` or `off`"
        ) from None
    _LOG.info(
        "%s took %.1f s and %d bytes; it said:\n%s", COREAI_BUILD, ran.seconds, ran.peak_bytes, ran.said
    )
    return ran


def _check_end(ran: Ran, what: str, out: Path) -> None:
    """Raise UserError if the compiler did not come to a good end."""
    if ran.problem is None:
        return
    free = shutil.disk_usage(out).free
    if _NO_SPACE.search(ran.said) or free < _LITTLE_SPACE:
        raise UserError(
            f"{what}: the disk of the results was full ({free:,} bytes are free now): a compiled bundle takes about "
            "twice the .aimodel, and as much while it is made; make room and run again"
        )
    if ran.died_by == "SIGKILL":
        raise UserError(
            f"{what}: {COREAI_BUILD} was killed after {ran.seconds:.0f} s, having used {ran.peak_bytes:,} bytes of "
            "memory: the system does so when memory is short; run fewer jobs at once (-j1)"
        )
    if ran.died_by:
        raise UserError(
            f"{what}: {ran.problem}. This is a fault of the compiler, known of its Neural Engine part "
            "(ANECompilerOffline) with decoders in chunks: try a newer Xcode, or take the target out of the artifact's "
            "`aot` and ship the .aimodel, which the device compiles itself"
        )
    raise UserError(
        f"{what}: {ran.problem}; all it said is in the log. Without this target in the artifact's `aot` the device "
        "compiles the .aimodel itself"
    )


def _output(written: Path, name: str, what: str) -> Path:
    """The compiled bundle; raises UserError unless it is there under its name."""
    if not (written / name).is_dir():
        found = sorted(path.name for path in written.iterdir())
        raise UserError(
            f"{what}: {COREAI_BUILD} ended with 0 and wrote {', '.join(found) or 'nothing'} instead of {name}, by "
            "which name apps find it; see what it said in the log"
        )
    return written / name


def _version() -> str:
    """What the compiler calls itself, `coreai-build 3600.83.1`."""
    ran = run_tool(COREAI_BUILD, ["--version"], ".")
    if ran.problem:
        raise UserError(f"{COREAI_BUILD} does not tell its version: {ran.problem}")
    return ran.said.strip()
