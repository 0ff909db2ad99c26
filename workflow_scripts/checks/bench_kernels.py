"""Part of `make bench`: what each Metal kernel reads, at the real model's row lengths, counted as its source runs.

A token's time on a GPU goes into reading weights, so a kernel is as fast as it reads little and in order.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from coreai_torch import TorchMetalKernel

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.kernels import (
    head_argmax_int4,
    head_argmax_int8,
    palette_matvec_int4,
    palette_matvec_int8,
)
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec, PackedMatrix
from workflow_scripts.kernels.packing import GROUP_ROWS, WORD_BITS
from workflow_scripts.kernels.partials import TILE_ROWS
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.msl.calls import KernelCall
from workflow_scripts.msl.compiler import compile_kernel
from workflow_scripts.msl.extract import extract
from workflow_scripts.msl.run import Accesses, count_accesses

_ROWS = 4 * GROUP_ROWS
_LIMIT = 32 << 10  # bytes of threadgroup memory that every GPU has (Metal feature set tables)
_MATVEC_COLUMNS = (1536, 6144, 12288)  # E2B: hidden size, and both sizes of its MLPs
_HEAD_COLUMNS = (1536,)
_MATVECS = (palette_matvec_int8, palette_matvec_int4)
_HEADS = (head_argmax_int8, head_argmax_int4)
_LOCAL_ARRAY = re.compile(r"^\s*(?!threadgroup\b)\w+ (\w+)\[\d+\]", re.MULTILINE)
_UNROLLED = re.compile(r"#pragma unroll\s+for \(uint (\w+) = \d+; \1 < \d+; \+\+\1\)")


@dataclass(frozen=True)
class Counted:
    """A call and what it used."""

    call: KernelCall
    accesses: Accesses

    def reads(self) -> dict[str, int]:
        """Bytes read of each argument."""
        sizes = {argument.name: argument.dtype.itemsize for argument in self.call.arguments}
        return {name: self.accesses.elements[name] * size for name, size in sizes.items()}

    def least(self) -> dict[str, int]:
        """Bytes of each argument: what a kernel reads that uses each element once."""
        return {a.name: prod(a.shape) * a.dtype.itemsize for a in self.call.arguments}


def print_table() -> None:
    """One line for each kernel and row length."""
    head = f"{'kernel':<22}{'K':>7}{'bytes/output':>14}{'least':>8}{'words read':>12}{'x read':>8}"
    print(f"{head}{'threads':>9}{'threadgroup memory':>20}")
    with tempfile.TemporaryDirectory(prefix="bench-kernels-") as home:
        for name, columns, counted in _measured(Path(home)):
            reads, least, outputs = counted.reads(), counted.least(), _ROWS
            stored = sum(size for argument, size in least.items() if argument != "X")
            memory = f"{counted.accesses.threadgroup_bytes} of {_LIMIT}"
            print(
                f"{name:<22}{columns:>7}{sum(reads.values()) / outputs:>14.0f}{stored / outputs:>8.0f}"
                f"{reads['W'] / least['W']:>11.2f}x{reads['X'] / least['X'] / outputs:>7.3f}x"
                f"{prod(counted.call.threadgroup):>9}{memory:>20}",
                flush=True,
            )
    print("least: each weight byte and codebook entry once; x read: per output, of its length")


def count(module: KernelMatvec | KernelHead, kernel: TorchMetalKernel, columns: int, home: Path) -> Counted:
    """Export a layer over `columns` columns, and count what its kernel uses for one input, in the folder `home`."""
    rows = len(module.words)
    tiles = (rows // TILE_ROWS,)
    outputs = (
        {"y": TensorSpec("float16", (1, 1, rows))}
        if isinstance(module, KernelMatvec)
        else {"values": TensorSpec("float32", tiles), "indices": TensorSpec("int32", tiles)}
    )
    spec = FunctionSpec({"x": TensorSpec("float16", (1, 1, columns))}, outputs)
    bundle = home / f"{kernel.name}_{columns}.aimodel"
    bundle.mkdir()
    save_bundle([Function("main", module, spec)], bundle, {}, [kernel])
    (call,) = extract(bundle)
    program = compile_kernel(call.source, call.name, "count", home)
    return Counted(call, count_accesses(program, call, {"X": np.ones((1, 1, columns), np.float16)}))


def moving_indices(source: str) -> list[str]:
    """Uses of a kernel's local arrays whose index no compiler knows: such an array lies in memory, not in registers."""
    unrolled = set(_UNROLLED.findall(source))
    found = []
    for array in _LOCAL_ARRAY.findall(source):
        for use in re.finditer(rf"\b{array}\[([^\]]*)\]", source):
            if not use[1].isdigit() and use[1] not in unrolled:
                found.append(use[0])
    return found


def zeros(bits: int, columns: int, rows: int = _ROWS) -> PackedMatrix:
    """A matrix whose codes are all 0: what a kernel reads does not depend on them."""
    words = torch.zeros((rows, columns * bits // WORD_BITS), dtype=torch.int32)
    # Not uniform, else they would stand in the program's text and not among its constants.
    words[0, 0] = 1
    codebook = torch.linspace(-1, 1, (rows // GROUP_ROWS) << bits, dtype=torch.float16)
    return PackedMatrix(words, codebook.reshape(rows // GROUP_ROWS, 1 << bits))


def _measured(home: Path) -> Iterator[tuple[str, int, Counted]]:
    for bindings, layer, lengths in (
        (_MATVECS, KernelMatvec, _MATVEC_COLUMNS),
        (_HEADS, KernelHead, _HEAD_COLUMNS),
    ):
        for binding in bindings:
            for columns in lengths:
                module = layer(binding.KERNEL, zeros(binding.BITS, columns))
                yield binding.KERNEL.name, columns, count(module, binding.KERNEL, columns, home)
