"""Compile a kernel's source to a program with the system C++ compiler: the modes of a gate, and one that counts."""

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workflow_scripts.closure import data_file
from workflow_scripts.errors import UserError
from workflow_scripts.msl.launcher import SOURCE_FILE, launcher
from workflow_scripts.msl.signature import buffer_names

_LOG = logging.getLogger(__name__)

MODES = ("fast", "address", "thread")
_SHIM = data_file(__file__, "shim/metal_stdlib").parent
_HEADERS = (
    data_file(__file__, "shim/metal_stdlib"),
    data_file(__file__, "shim/MetalPerformancePrimitives/MetalPerformancePrimitives.h"),
    data_file(__file__, "shim/msl_scalar.h"),
    data_file(__file__, "shim/msl_vec.h"),
    data_file(__file__, "shim/msl_math.h"),
    data_file(__file__, "shim/msl_simd.h"),
    data_file(__file__, "shim/msl_tensor.h"),
    data_file(__file__, "shim/msl_thread.h"),
    data_file(__file__, "shim/msl_call.h"),
    data_file(__file__, "shim/msl_keywords.h"),
)
_RUNTIME = (
    data_file(__file__, "shim/runtime.cpp"),
    data_file(__file__, "shim/scheduler.h"),
    data_file(__file__, "shim/plan.h"),
    data_file(__file__, "shim/fibers.h"),
    data_file(__file__, "shim/msl_thread.h"),
)
_OLDEST = {"g++": 12, "clang": 15}
_INSTALL = (
    "install g++ 12 or newer (Debian, Ubuntu: apt install g++) "
    "or clang 15 or newer (macOS: xcode-select --install)"
)
_TIMEOUT = 300  # seconds for one compilation

# No contraction: a * b + c rounds twice unless the source says fma, on every machine alike.
_COMMON = ("-std=c++2b", "-w", "-fsigned-char", "-ffp-contract=off")
_SANITIZERS = {
    "fast": ("-O2",),
    "address": ("-O1", "-g1", "-DMSL_ADDRESS", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "count": ("-O0", "-DMSL_COUNT"),  # compiled in two thirds of the time of -O1; a run takes milliseconds
    "thread": ("-O1", "-g1", "-DMSL_THREAD", "-fsanitize=thread"),
}


@dataclass(frozen=True)
class Compiler:
    """A usable C++ compiler: its command and the first line of its `--version`."""

    command: str
    version: str

    @property
    def is_clang(self) -> bool:
        """Clang and GCC differ in the names of a few options."""
        return "clang" in self.version


@dataclass(frozen=True)
class Compiled:
    """A kernel's program; `buffers` are the names of its arguments, then of its results."""

    program: Path
    kernel: str
    mode: str
    buffers: tuple[str, ...]


def find_compiler() -> Compiler:
    """The compiler named by $CXX, or the first of c++, g++, clang++ that is new enough; else UserError."""
    chosen = os.environ.get("CXX")
    seen = []
    for command in [chosen] if chosen else ["c++", "g++", "clang++"]:
        if shutil.which(command) is None:
            continue
        compiler = _describe(command)
        if _new_enough(compiler):
            return compiler
        seen.append(f"{command} is {compiler.version or 'of unknown version'}")
    found = "; ".join(seen) or (f"$CXX names {chosen}, which is not found" if chosen else "none is installed")
    raise UserError(f"running Metal kernels on the CPU needs a C++23 compiler ({found}): {_INSTALL}")


def compile_kernel(source: str, kernel: str, mode: str, folder: Path) -> Compiled:
    """The program of `kernel` in `mode`; taken from `folder` if it was compiled there before.

    Modes: `fast` optimized, with index-checked tensors; `address` adds ASan and UBSan; `thread` adds TSan;
    `count` counts accesses, see `run.count_accesses`.
    Raises UserError without a compiler, and with the compiler's first errors for a source it rejects.
    """
    compiler = find_compiler()
    text = launcher(source, kernel)
    folder = folder.resolve()  # the compiler runs in a folder of its own
    folder.mkdir(parents=True, exist_ok=True)
    flags = (*_COMMON, *_extra_flags(compiler), *_SANITIZERS[mode])
    runtime = _runtime_object(compiler, mode, folder)
    program = folder / f"{kernel}-{mode}-{_key(compiler, flags, _HEADERS, source, text, runtime.name)}"

    def build(out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            (Path(place) / SOURCE_FILE).write_text(source, encoding="utf-8")
            (Path(place) / "launcher.cpp").write_text(text, encoding="utf-8")
            sections = ("-fsanitize-sections=msltg",) if mode == "address" and not compiler.is_clang else ()
            # In its own folder, with a relative name: messages and debug lines say `kernel.metal:12`.
            _run(
                [
                    compiler.command,
                    *flags,
                    *sections,
                    f"-I{_SHIM}",
                    "launcher.cpp",
                    str(runtime),
                    "-o",
                    str(out),
                ],
                place,
                kernel,
            )

    _once(program, build)
    return Compiled(program, kernel, mode, tuple(buffer_names(source, kernel)))


def _runtime_object(compiler: Compiler, mode: str, folder: Path) -> Path:
    """The scheduler, compiled once per mode and never instrumented: it moves between stacks.

    -O2 would take half as long again to compile and make a full-size head 5% faster (measured).
    """
    define = [flag for flag in _SANITIZERS[mode] if flag.startswith("-D")]
    flags = (
        *_COMMON,
        "-O1",
        *define,
        *(("-fcf-protection=none",) if platform.machine() in ("x86_64", "AMD64") else ()),
    )
    out = folder / f"runtime-{mode}-{_key(compiler, flags, _RUNTIME)}.o"
    command = [compiler.command, *flags, f"-I{_SHIM}", "-c", str(_RUNTIME[0]), "-o"]
    _once(out, lambda partial: _run([*command, str(partial)], str(folder), "the runtime"))
    return out


def _once(path: Path, build: Callable[[Path], None]) -> None:
    """Build a file unless it is there; two processes wait for each other, and a broken build leaves nothing."""
    if path.exists():
        return
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        partial = path.with_name(path.name + ".partial")
        build(partial)
        partial.rename(path)


def _run(command: Sequence[str], folder: str, what: str) -> None:
    _LOG.info("compiling %s", what)
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT,
    )
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "error" in line or "undefined reference" in line
        ]
        shown = "\n".join(errors[:5] or done.stderr.splitlines()[-5:])
        raise UserError(f"the C++ compiler rejects {what}:\n{shown}")


def _key(compiler: Compiler, flags: Sequence[str], files: Sequence[Path], *texts: str) -> str:
    digest = hashlib.sha256("\0".join([compiler.command, compiler.version, *flags, *texts]).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


@cache
def _describe(command: str) -> Compiler:
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return Compiler(command, done.stdout.partition("\n")[0])


def _new_enough(compiler: Compiler) -> bool:
    found = re.search(
        r"(\d+)\.\d+", compiler.version.rpartition(")")[2] if not compiler.is_clang else compiler.version
    )
    return bool(found) and int(found[1]) >= _OLDEST["clang" if compiler.is_clang else "g++"]


@cache
def _extra_flags(compiler: Compiler) -> tuple[str, ...]:
    """Flags of which compilers have one or the other: `1.0` is a float, half rounds after every operation."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    wishes = [
        [("-fsingle-precision-constant",), ("-Xclang", "-cl-single-precision-constant")],
        [("-ffloat16-excess-precision=none",), ("-fexcess-precision=16",)] if x86 else [],
        [("-march=x86-64-v3",)] if x86 else [],  # float16 conversions and fma in hardware
        [("-fstack-clash-protection",)],  # a large frame touches the guard page instead of jumping over it
    ]
    return tuple(flag for options in wishes for flag in _first_accepted(compiler, options))


def _first_accepted(compiler: Compiler, options: list[tuple[str, ...]]) -> tuple[str, ...]:
    for flags in options:
        command = [compiler.command, *flags, "-Werror", "-fsyntax-only", "-x", "c++", "-"]
        if subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0:
            return flags
    return ()
