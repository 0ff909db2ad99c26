"""What bundles that are changed for this host to run have in common: reading their constants, and saving them.

Nothing of it is kept: a copy is there for the time of a block.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from coreai.authoring import AIProgram

from workflow_scripts.coreai import private
from workflow_scripts.coreai.bytecode import Constant, read_constants
from workflow_scripts.errors import UserError
from workflow_scripts.progress import working

_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)")
_COPIES = 2  # the copy, and what the runtime lowers it to beside it


def axes(value: private.KernelValue) -> list[int]:
    """The shape of a value."""
    return [int(axis) for axis in _TENSOR.match(value.type_text)[1].split("x") if axis]


def element(value: private.KernelValue) -> str:
    """The element type of a value by its MLIR name, such as `f16` or `si4`."""
    return _TENSOR.match(value.type_text)[2]


def constants_of(program: Path) -> dict[str, Constant]:
    """Name of the resource -> where it lies in a main.mlirb."""
    return {constant.name: constant for constant in read_constants(program)}


def stored_bytes(program: Path, stored: Mapping[str, Constant], value: private.KernelValue) -> np.ndarray:
    """A constant's bytes, uint8, flat; small and uniform constants have their elements in the program's text.

    Raises UserError where the program does not hold it.
    """
    if value.elements is not None:
        return np.ascontiguousarray(value.elements).reshape(-1).view(np.uint8)
    place = stored.get(value.resource or "")
    if place is None:
        raise UserError(f"{program} does not hold the constants that its operations take: build it again")
    return np.memmap(program, np.uint8, "r", place.offset, (place.size,))


@contextmanager
def saved_copy(program: AIProgram, bundle: Path, growth: int, why: str) -> Iterator[Path]:
    """A temporary folder with `program`, as an asset with the name of `bundle`; gone after the block.

    `growth` is by how many bytes it is larger than the bundle, `why` is there a copy. Raises UserError where there is
    no room for it. That is asked before: a write error would end the process without an exception and leave the folder
    (measured: "LLVM ERROR: IO failure on output stream").
    """
    place = tempfile.gettempdir()
    size = (bundle / "main.mlirb").stat().st_size + growth
    needed = _COPIES * size
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"{bundle.name} {why}: it needs {needed:,} bytes in {place}, where {free:,} are free; make room or set "
            "TMPDIR to another folder"
        )
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / bundle.name
        try:
            folder.mkdir()
            with working(f"write a copy of {bundle.name} for this host", folder, size):
                private.write_asset(program, folder, {})
        except OSError as problem:
            raise UserError(f"{folder} cannot be written: {problem.strerror}") from problem
        yield folder
