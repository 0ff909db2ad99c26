"""Encodings: what a matrix becomes in storage, and how its rows are streamed there from the checkpoint."""

import math
from typing import Any

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import DTYPES, SafetensorsWriter
from workflow_scripts.errors import UserError
from workflow_scripts.quantize.linear import LinearBlock, check_blocks, quantize_linear
from workflow_scripts.quantize.palette import PaletteBlock, check_groups, palettize
from workflow_scripts.quantize.qat_grid import recover_grid
from workflow_scripts.quantize.quality import GridFit, Quality
from workflow_scripts.quantize.recipes import DenseEncoding, Encoding, LinearEncoding, PaletteEncoding
from workflow_scripts.quantize.weights import stored_parts
from workflow_scripts.threads import in_order

# Weights in work at once on each thread, some 6 MB of temporaries: few enough that these stay in the processor's cache
# from one loop to the next (of 2^20 weights, linear codes take half the time per weight of 2^22, measured).
_BLOCK_WEIGHTS = 1 << 19
_STORED = {"float16": "F16", "float32": "F32"}


def describe(name: str, shape: tuple[int, ...], encoding: Encoding) -> dict[str, Any]:
    """A matrix's entry in the index (without `file`). Raises UserError where its shape does not suit the encoding."""
    if isinstance(encoding, DenseEncoding):
        return {"kind": "dense", "shape": list(shape), "dtype": _STORED[encoding.dtype]}
    if isinstance(encoding, LinearEncoding):
        check_blocks(shape, encoding.block_size, name)
        return {
            "kind": "linear",
            "shape": list(shape),
            "bits": encoding.bits,
            "block_size": encoding.block_size,
        }
    check_groups(shape, encoding.group_size, name)
    return {
        "kind": "palette",
        "shape": list(shape),
        "bits": encoding.bits,
        "group_size": encoding.group_size,
    }


def shipped_bytes(entry: dict[str, Any]) -> int:
    """Bytes of a matrix of the index as a bundle ships it: there a code takes no more than its bits."""
    parts = stored_parts("", entry).values()
    size = sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in parts)
    if "bits" in entry:
        size -= math.prod(entry["shape"]) * (8 - entry["bits"]) // 8
    return size


def encode(
    checkpoint: Checkpoint, name: str, encoding: Encoding, writer: SafetensorsWriter, threads: int
) -> Quality:
    """Write a matrix in row blocks, in work on `threads` at once; returns how much of it was kept.

    The bytes and figures do not depend on `threads`. Raises UserError for weights that the encoding cannot hold.
    """
    if isinstance(encoding, DenseEncoding):
        return _encode_dense(checkpoint, name, np.dtype(encoding.dtype), writer, threads)
    if isinstance(encoding, LinearEncoding):
        return _encode_linear(checkpoint, name, encoding, writer, threads)
    return _encode_palette(checkpoint, name, encoding, writer, threads)


def _encode_dense(
    checkpoint: Checkpoint, name: str, dtype: np.dtype, writer: SafetensorsWriter, threads: int
) -> Quality:
    weights, quality = checkpoint.array(name), Quality()

    def work(rows: slice) -> tuple[np.ndarray, Quality]:
        return _dense_block(weights[rows].astype(np.float32), dtype, name)

    for stored, kept in in_order(work, row_blocks(weights.shape, _BLOCK_WEIGHTS), threads):
        quality.add(kept.signal, kept.error)
        writer.append(name, stored)
    return quality


def _dense_block(original: np.ndarray, dtype: np.dtype, name: str) -> tuple[np.ndarray, Quality]:
    if not np.isfinite(original).all():
        raise UserError(f"{name} holds a weight that is infinite or not a number: the checkpoint is damaged")
    with np.errstate(over="ignore"):
        stored = original.astype(dtype)
    if not np.isfinite(stored).all():
        raise UserError(f"{name} has weights beyond the largest {dtype}: use recipe fp32 for this model")
    quality = Quality()
    quality.compare(original, stored.astype(np.float32))
    return stored, quality


def _encode_palette(
    checkpoint: Checkpoint, name: str, encoding: PaletteEncoding, writer: SafetensorsWriter, threads: int
) -> Quality:
    weights, quality, codebooks = checkpoint.array(name), Quality(), []

    def work(rows: slice) -> PaletteBlock:
        return palettize(weights[rows], encoding.bits, encoding.group_size, name, encoding.tolerance)

    for block in in_order(work, row_blocks(weights.shape, _BLOCK_WEIGHTS, encoding.group_size), threads):
        quality.add(block.quality.signal, block.quality.error)
        codebooks.append(block.codebook)
        writer.append(f"{name}.indices", block.indices)
    writer.write(f"{name}.codebook", np.concatenate(codebooks))
    return quality


def _encode_linear(
    checkpoint: Checkpoint, name: str, encoding: LinearEncoding, writer: SafetensorsWriter, threads: int
) -> Quality:
    weights, quality, steps = checkpoint.array(name), Quality(fit=GridFit()), []

    def work(rows: slice) -> LinearBlock:
        return _linear_block(weights[rows].astype(np.float32), encoding, name, rows.start)

    for block in in_order(work, row_blocks(weights.shape, _BLOCK_WEIGHTS), threads):
        quality.add(block.quality.signal, block.quality.error)
        quality.fit += block.quality.fit
        steps.append(block.steps)
        writer.append(f"{name}.codes", block.codes)
    writer.write(f"{name}.steps", np.concatenate(steps))
    return quality


def _linear_block(rows: np.ndarray, encoding: LinearEncoding, name: str, first_row: int) -> LinearBlock:
    if encoding.scheme == "qat":
        return recover_grid(rows, encoding.block_size, name, first_row)
    return quantize_linear(rows, encoding.bits, encoding.scheme, encoding.block_size, name, first_row)
