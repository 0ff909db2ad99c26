"""What a bundle that was compiled ahead of time holds, and whether it is what was asked for.

The compiler's exit code is no verdict: it is 0 for an architecture that no such device has, and 0 where the Neural
Engine's part failed and the GPU's was written instead (published, and reported to Apple). So the files are looked at.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path

from workflow_scripts.coreai.architectures import Target
from workflow_scripts.coreai.xcrun import COREAI_BUILD
from workflow_scripts.errors import UserError
from workflow_scripts.files import tree_files
from workflow_scripts.progress import TERMINAL

_GIB = 1 << 30
# Devices load a resources.bin of 2.39 GiB and refuse one of 3.13 GiB; nobody published what is between (the compiler
# writes 6 GB without a word).
LOADS_BYTES, REFUSED_BYTES = int(2.39 * _GIB), int(3.13 * _GIB)
RESOURCES = "resources.bin"
_DELEGATE = "MPSGraph"  # the GPU's and the Neural Engine's parts both lie in it
_SAYS_DONE = f"{COREAI_BUILD} ended with 0, but"


@dataclass(frozen=True)
class Contents:
    """What a compiled bundle holds.

    `files`: path below it -> bytes; `delegates`: the frameworks that run parts of it; `ane_regions`: how many programs
    for the Neural Engine there are; `resources_bytes`: of the largest resources.bin, 0 without one; `main_hash`: hex,
    the name under which a device caches it, None where there is no such file.
    """

    files: dict[str, int]
    delegates: list[str]
    ane_regions: int
    resources_bytes: int
    main_hash: str | None


def inspect(compiled: Path, architecture: str, what: str) -> Contents:
    """Look at a compiled bundle. Raises UserError where its program or anything of its form is missing."""
    for path in compiled.rglob("*"):
        if path.is_symlink():
            raise UserError(
                f"{what}: {path.relative_to(compiled)} in it is a symlink, which apps do not follow: report it to Apple"
            )
    files = {path.relative_to(compiled).as_posix(): path.stat().st_size for path in tree_files(compiled)}
    program = f"main-{architecture}.mlirb"
    if not files.get(program):
        found = ", ".join(sorted({path.partition("/")[0] for path in files})) or "nothing"
        raise UserError(
            f"{what}: {_SAYS_DONE} {compiled.name} has no program {program} (it holds {found}): run again, and if it "
            "stays so, this Xcode writes another form than this pipeline knows"
        )
    delegates = f"main-{architecture}-delegates"
    hash_file = compiled / "main.hash"
    return Contents(
        files=files,
        delegates=sorted({path.split("/")[1] for path in files if path.startswith(f"{delegates}/")}),
        # A region is a folder, a file of weights and this file, all of one name: a loose pattern counts it thrice.
        ane_regions=sum(path.is_file() for path in compiled.rglob("*ANE_region_*.mlir.bc")),
        resources_bytes=max(
            (size for path, size in files.items() if Path(path).name == RESOURCES), default=0
        ),
        main_hash=hash_file.read_bytes().hex() if hash_file.is_file() else None,
    )


def resources_verdict(size: int) -> str:
    """`ok`, `warn` or `fail`: whether devices load a resources.bin of so many bytes."""
    if size <= LOADS_BYTES:
        return "ok"
    return "warn" if size < REFUSED_BYTES else "fail"


def check_contents(contents: Contents, target: Target, what: str, said: str) -> None:
    """Raise UserError where a compiled bundle is not what the target asks for, or no device loads it."""
    if target.preferred_compute != "none" and _DELEGATE not in contents.delegates:
        raise UserError(
            f"{what}: {_SAYS_DONE} there is no {_DELEGATE} delegate for the {target.preferred_compute} in it "
            f"({', '.join(contents.delegates) or 'none at all'}), so it would run on the CPU: see the log"
        )
    if target.preferred_compute == "neural-engine" and contents.ane_regions == 0:
        complaints = said.count("ANECCompileOffline() failed")
        raise UserError(
            f"{what}: {_SAYS_DONE} there are 0 regions for the Neural Engine (its compiler complained {complaints} "
            "times, see the log): all would run on the GPU. Linear weights, changing shapes and float32 do this: use a "
            "graph form and a recipe for the Neural Engine, or prefer gpu"
        )
    if target.preferred_compute == "gpu" and contents.ane_regions:
        raise UserError(
            f"{what}: {contents.ane_regions} regions are for the Neural Engine though the gpu was asked for: prefer "
            "neural-engine or none if that is wanted"
        )
    verdict = resources_verdict(contents.resources_bytes)
    size = f"{RESOURCES} of {contents.resources_bytes / _GIB:.2f} GiB"
    if verdict == "fail":
        raise UserError(
            f"{what}: it has a {size}, and devices refuse {REFUSED_BYTES / _GIB:.2f} GiB and more: use a recipe with "
            "smaller weights, or a decoder in chunks"
        )
    if verdict == "warn":
        TERMINAL.warning(
            "%s: it has a %s; devices load up to %.2f GiB for sure: try it on one",
            *(what, size, LOADS_BYTES / _GIB),
        )


def files_with(compiled: Path, folders: list[Path]) -> list[str]:
    """Files of a compiled bundle that name one of these folders. Weights are not searched."""
    texts = [str(folder).encode() for folder in folders]
    paths = [path for path in tree_files(compiled) if path.name != RESOURCES and path.stat().st_size]
    return [path.relative_to(compiled).as_posix() for path in paths if _holds(path, texts)]


def _holds(path: Path, texts: list[bytes]) -> bool:
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(text) >= 0 for text in texts)
