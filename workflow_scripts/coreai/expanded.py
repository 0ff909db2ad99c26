"""A small bundle with its block codes multiplied by their steps once, and not in every call.

The Linux runtime does it again for each token, which takes half of its time (measured: 155 ms of a call of the embedded
model's decoder against 77 ms). The values are the same to the bit: a code has few digits, so its product with a step is
rounded once in either way. Gate `numbers` runs every bundle as it ships; what feeds hundreds of tokens may run this.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from coreai.authoring import AIModelAsset

from workflow_scripts.coreai import private
from workflow_scripts.coreai.bytecode import Constant, read_constants

_SMALL = 1 << 26  # bytes of a program; E2B's would grow to 10 GB
_TENSOR = re.compile(r"tensor<((?:\d+x)+)(\w+)>")
_CODE_BITS = {"si4": 4, "si8": 8}
_STEPS = {"f16": np.float16, "f32": np.float32}


@contextmanager
def expanded(bundle: Path) -> Iterator[Path]:
    """A folder to load in place of `bundle`, for the time of the block; the bundle itself where it is large.

    And on a Mac, which runs what ships.
    """
    program = bundle / "main.mlirb"
    if sys.platform == "darwin" or not program.is_file() or program.stat().st_size > _SMALL:
        yield bundle
        return
    asset = AIModelAsset.load(bundle).program
    stored = {constant.name: constant for constant in read_constants(program)}
    private.replace_block_codes(asset, partial(_values, program, stored))
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / bundle.name
        folder.mkdir()
        private.write_asset(asset, folder, {})
        yield folder


def _values(
    path: Path, stored: dict[str, Constant], codes: private.KernelValue, steps: private.KernelValue
) -> np.ndarray | None:
    """Codes [N, K] times steps [N, K / block], in the steps' type; None for anything else."""
    shape, bits = _axes(codes), _CODE_BITS.get(_element(codes))
    blocks, dtype = _axes(steps), _STEPS.get(_element(steps))
    if not bits or not dtype or len(shape) != 2 or len(blocks) != 2 or codes.resource not in stored:
        return None
    numbers = _signed(_bytes(path, stored[codes.resource]), bits).reshape(shape)
    if steps.elements is None:
        factors = _bytes(path, stored[steps.resource]).view(dtype)
    else:
        factors = np.asarray(steps.elements, dtype)
    factors = factors.reshape(blocks).repeat(shape[1] // blocks[1], axis=1)
    return numbers.astype(dtype) * factors


def _signed(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes int8 from their packed bytes, the low half first."""
    if bits == 8:
        return data.view(np.int8)
    halves = np.stack([data << 4, data & 0xF0], axis=-1).view(np.int8)
    return (halves >> 4).reshape(-1)


def _bytes(path: Path, constant: Constant) -> np.ndarray:
    return np.memmap(path, np.uint8, "r", constant.offset, (constant.size,))


def _axes(value: private.KernelValue) -> list[int]:
    return [int(axis) for axis in _TENSOR.match(value.type_text)[1].split("x") if axis]


def _element(value: private.KernelValue) -> str:
    return _TENSOR.match(value.type_text)[2]
