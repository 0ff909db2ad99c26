"""A checkpoint as quantization-aware training publishes it: every matrix on a grid of 4-bit levels, kept in bfloat16.

`write_qat_checkpoint(source, folder)` copies a published folder and puts its matrices on such grids. The published one
lies like this: per block of 32 along a row one step of float32 precision, levels -8..7, and the peak of about half of
the blocks at a level below 8. K and V matrices of KV-shared layers are left out. `build_qat` checks it as well.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from tests import tiny
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import map_tensor, read_header

BLOCK = 32
PEAK_LEVELS = np.arange(1, 9)
PEAK_SHARES = np.array([0.01, 0.01, 0.02, 0.04, 0.06, 0.12, 0.24, 0.50])


@dataclass(frozen=True)
class OnGrid:
    """`values` bfloat16 [N, K] are `levels` int8 [N, K] times `steps` float32 [N, K / 32], rounded once."""

    values: np.ndarray
    levels: np.ndarray
    steps: np.ndarray


def put_on_grid(weights: np.ndarray, random: np.random.Generator) -> OnGrid:
    """The nearest levels of a random step per block; a peak at level 8 is a negative one."""
    blocks = np.asarray(weights, np.float32).reshape(len(weights), -1, BLOCK)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), axis=-1)
    levels = random.choice(PEAK_LEVELS, size=peaks.shape, p=PEAK_SHARES)
    levels = np.where((levels == 8) & (peaks > 0), 7, levels)
    # A trained step is not the rounded peak over its level, but somewhere near.
    steps = (np.abs(peaks) / levels * random.uniform(0.98, 1.02, peaks.shape)).astype(np.float32)
    codes = np.clip(np.rint(blocks / np.where(steps, steps, 1)), -8, 7).astype(np.float32)
    values = (codes * steps).astype(ml_dtypes.bfloat16)
    return OnGrid(
        values.reshape(weights.shape), codes.astype(np.int8).reshape(weights.shape), steps[:, :, 0].copy()
    )


def build_qat(source: Path, root: Path) -> Checkpoint:
    """The published folder `source` on its grid, as the result of stage `checkpoint` in the folder `root`."""
    return tiny.build_tree(write_qat_checkpoint(source, root / "published"), root / "checkpoint")


def write_qat_checkpoint(source: Path, folder: Path, seed: int = 0) -> Path:
    """Copy the published folder `source` with every matrix on a grid, pruned; returns `folder`."""
    random = np.random.default_rng(seed)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, info in read_header(file).items():
            values = map_tensor(info)
            tensors[name] = put_on_grid(values, random).values if values.ndim == 2 else values
    tiny.write_tensors(folder / "model.safetensors", tensors)
    return folder
