"""A checkpoint in a real model's shape with random weights, to rehearse a release at full size without a download.

The weights mean nothing, but they are tame: what a float32 forward pass gets wrong in the last bits stays in the last
bits, where plainly normal weights blow it up a thousandfold (measured). See `_distribution`.
"""

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.layout import PER_LAYER_EMBEDDING, published_tensors
from workflow_scripts.checkpoint.needed import INDEX, SINGLE
from workflow_scripts.checkpoint.random_weights import Normal, fill_normal, tensor_key
from workflow_scripts.checkpoint.safetensors import SafetensorsWriter
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.files import write_json
from workflow_scripts.progress import track

_LOG = logging.getLogger(__name__)

BLOCK = 8 << 20
"""Numbers that are made at a time, all in one buffer of 16 MiB."""
_DTYPE = np.dtype(ml_dtypes.bfloat16)
_SPREAD = 0.1  # standard deviation of norm weights and layer scalars, as a share of their mean
_BRANCH = 0.25  # norm weights after a branch: the residual stream outweighs what a layer adds to it

Shapes = dict[str, tuple[int, ...]]


def random_tensor(seed: int, name: str, shape: tuple[int, ...], config: TextConfig) -> Iterator[np.ndarray]:
    """One tensor by its published name, as consecutive bfloat16 blocks: whole rows [n, *shape[1:]].

    Each block lies in the buffer of the one before it.
    """
    width = math.prod(shape[1:])
    blocks = list(row_blocks(shape, BLOCK))
    buffer = np.empty(blocks[0].stop * width, _DTYPE)
    key, normal = tensor_key(seed, name), _distribution(name, shape, config)
    for rows in blocks:
        block = buffer[: (rows.stop - rows.start) * width]
        fill_normal(block, key, rows.start * width, normal)
        yield block.reshape(-1, *shape[1:])


def write_random_weights(folder: Path, config: TextConfig, seed: int, shard_bytes: int | None) -> None:
    """Write all text tensors of a published checkpoint into `folder`; a block of one tensor is in memory.

    One model.safetensors; with `shard_bytes` shards of at most so many bytes of tensors, but of one tensor at least,
    and their index. A tensor's bytes are the same either way, and depend on the seed, its name and its shape alone.
    """
    shapes = dict(sorted(published_tensors(config).items()))
    files = _name_files(_split(shapes, shard_bytes), shard_bytes is not None)
    blocks = sum(1 for shape in shapes.values() for _ in row_blocks(shape, BLOCK))
    steps = track(range(1, blocks + 1), "random weights: block", blocks)
    for file, tensors in files.items():
        declared = {name: ("BF16", shape) for name, shape in tensors.items()}
        with SafetensorsWriter(folder / file, declared, {"format": "pt"}) as writer:
            for name, shape in tensors.items():
                _LOG.info("%s %s into %s", name, list(shape), file)
                for rows, _ in zip(random_tensor(seed, name, shape, config), steps, strict=False):
                    writer.append(name, rows)
    if shard_bytes is not None:
        placed = {name: file for file, tensors in files.items() for name in tensors}
        total = sum(map(_size, shapes.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _distribution(name: str, shape: tuple[int, ...], config: TextConfig) -> Normal:
    """How a tensor's numbers are distributed, so that every activation is of the order of 1.

    Matrices have a deviation of 1/sqrt(fan_in). Scores of attention have no 1/sqrt(head_dim), so the norms of queries
    and keys bring it in, half of it each: else softmax would be saturated, and every rounding error grow in it.
    """
    if len(shape) > 1:
        row = config.hidden_size_per_layer_input if name.endswith(PER_LAYER_EMBEDDING) else shape[-1]
        return Normal(0.0, 1 / math.sqrt(row))
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        mean = 1 / math.sqrt(math.sqrt(shape[0]))
    else:
        mean = _BRANCH if ".post_" in name else 1.0
    return Normal(mean, _SPREAD * mean)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _DTYPE.itemsize


def _split(shapes: Shapes, shard_bytes: int | None) -> list[Shapes]:
    """The tensors of each file, in their order."""
    shards: list[Shapes] = [{}]
    used = 0
    for name, shape in shapes.items():
        if shard_bytes is not None and shards[-1] and used + _size(shape) > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += _size(shape)
    return shards


def _name_files(shards: list[Shapes], sharded: bool) -> dict[str, Shapes]:
    """File name -> its tensors, as Hugging Face names them."""
    if not sharded:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }
