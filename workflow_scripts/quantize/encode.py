"""Encodings: what a matrix becomes in storage, and how its rows are streamed there from the checkpoint."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import SafetensorsWriter
from workflow_scripts.errors import UserError
from workflow_scripts.quantize.palette import check_groups, palettize
from workflow_scripts.quantize.quality import Quality
from workflow_scripts.quantize.recipes import DenseEncoding, PaletteEncoding

_BLOCK_WEIGHTS = 1 << 22  # weights in work at once: some 50 MB of temporaries
_STORED = {"float16": "F16", "float32": "F32"}


def describe(name: str, shape: tuple[int, ...], encoding: DenseEncoding | PaletteEncoding) -> dict[str, Any]:
    """A matrix's entry in the index (without `file`). Raises UserError where its shape does not suit the encoding."""
    if isinstance(encoding, DenseEncoding):
        return {"kind": "dense", "shape": list(shape), "dtype": _STORED[encoding.dtype]}
    check_groups(shape, encoding.group_size, name)
    return {
        "kind": "palette",
        "shape": list(shape),
        "bits": encoding.bits,
        "group_size": encoding.group_size,
    }


def encode(
    checkpoint: Checkpoint, name: str, encoding: DenseEncoding | PaletteEncoding, writer: SafetensorsWriter
) -> Quality:
    """Write a matrix in row blocks; returns how much of it was kept. Raises UserError for weights it cannot hold."""
    if isinstance(encoding, DenseEncoding):
        return _encode_dense(checkpoint, name, np.dtype(encoding.dtype), writer)
    return _encode_palette(checkpoint, name, encoding, writer)


def _encode_dense(checkpoint: Checkpoint, name: str, dtype: np.dtype, writer: SafetensorsWriter) -> Quality:
    quality = Quality()
    for rows in _row_blocks(checkpoint.shape(name), 1):
        original = checkpoint.float32(name, rows)
        if not np.isfinite(original).all():
            raise UserError(
                f"{name} holds a weight that is infinite or not a number: the checkpoint is damaged"
            )
        with np.errstate(over="ignore"):
            stored = original.astype(dtype)
        if not np.isfinite(stored).all():
            raise UserError(f"{name} has weights beyond the largest {dtype}: use recipe fp32 for this model")
        quality.compare(original, stored.astype(np.float32))
        writer.append(name, stored)
    return quality


def _encode_palette(
    checkpoint: Checkpoint, name: str, encoding: PaletteEncoding, writer: SafetensorsWriter
) -> Quality:
    quality, codebooks = Quality(), []
    weights = checkpoint.array(name)
    for rows in _row_blocks(weights.shape, encoding.group_size):
        block = palettize(weights[rows], encoding.bits, encoding.group_size, name)
        quality.add(block.quality.signal, block.quality.error)
        codebooks.append(block.codebook)
        writer.append(f"{name}.indices", block.indices)
    writer.write(f"{name}.codebook", np.concatenate(codebooks))
    return quality


def _row_blocks(shape: tuple[int, ...], multiple: int) -> Iterator[slice]:
    """Row ranges of about `_BLOCK_WEIGHTS` weights whose starts are multiples of `multiple`."""
    rows, columns = shape
    size = max(1, _BLOCK_WEIGHTS // (columns * multiple)) * multiple
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
