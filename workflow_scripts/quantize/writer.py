"""Makes the quantized weights of a checkpoint. `weights.py` reads them, so that exports do not depend on this code."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import DTYPES, SafetensorsWriter
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.quantize.encode import describe, encode
from workflow_scripts.quantize.quality import Quality
from workflow_scripts.quantize.recipes import Recipe
from workflow_scripts.quantize.weights import FORMAT, INDEX, stored_parts

HEAD = "embed_tokens.weight"  # tied: the head is the token embedding

Index = dict[str, dict[str, Any]]


def write_weights(checkpoint: Checkpoint, recipe: Recipe, out: Path) -> None:
    """Fill the folder `out` with `core.safetensors`, `head.safetensors`, `weights.json` and `report.json`.

    Streams: a block of rows of one tensor is in memory. Raises UserError naming the tensor where the recipe does not
    suit its shape, a weight is not finite, or more is lost than the recipe allows.
    """
    index = _index(checkpoint, recipe)
    qualities: dict[str, Quality] = {}
    for file in dict.fromkeys(entry["file"] for entry in index.values()):
        entries = {name: entry for name, entry in index.items() if entry["file"] == file}
        parts = {name: part for item in entries.items() for name, part in stored_parts(*item).items()}
        with SafetensorsWriter(out / file, parts) as writer:
            for name in track(entries, f"{recipe.name} {file}", len(entries)):
                if entries[name]["kind"] == "vector":
                    writer.write(name, _vector(checkpoint, name))
                else:
                    qualities[name] = _matrix(checkpoint, name, recipe, writer)
    record = {
        "format": FORMAT,
        "recipe": recipe.name,
        "checkpoint": checkpoint.digest,
        "text_config": checkpoint.config.to_json(),
        "tensors": index,
    }
    write_json(out / INDEX, record)
    write_json(out / "report.json", _report(recipe, index, qualities))


def _index(checkpoint: Checkpoint, recipe: Recipe) -> Index:
    """All entries, in the order of their bytes; every shape is checked before any work begins.

    The per-layer embedding table and its context projection are left to the stage `tables`.
    """
    core = [name for name in checkpoint.names() if name.startswith("layers.") or name == "norm.weight"]
    return {
        name: {**_entry(name, checkpoint.shape(name), recipe), "file": file}
        for file, names in (("core.safetensors", core), ("head.safetensors", [HEAD]))
        for name in names
    }


def _entry(name: str, shape: tuple[int, ...], recipe: Recipe) -> dict[str, Any]:
    """Norm weights and layer scalars are vectors, kept in float32; all else goes by the recipe."""
    if len(shape) == 1:
        return {"kind": "vector", "shape": list(shape), "dtype": "F32"}
    return describe(name, shape, recipe.encoding)


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    vector = checkpoint.float32(name)
    if not np.isfinite(vector).all():
        raise UserError(f"{name} holds a value that is infinite or not a number: the checkpoint is damaged")
    return vector


def _matrix(checkpoint: Checkpoint, name: str, recipe: Recipe, writer: SafetensorsWriter) -> Quality:
    quality = encode(checkpoint, name, recipe.encoding, writer)
    if quality.snr_db is not None and quality.snr_db < recipe.snr_floor_db:
        raise UserError(
            f"{name} keeps a signal-to-noise ratio of only {quality.snr_db} dB in recipe {recipe.name}, which "
            f"must keep {recipe.snr_floor_db}: its weights are too small or too unusual for it; use recipe fp32"
        )
    return quality


def _report(recipe: Recipe, index: Index, qualities: dict[str, Quality]) -> dict[str, Any]:
    """Per matrix and in total: parameters, bytes, stored bits per weight, and SNR in dB (null: stored exactly)."""
    total, parameters, size = Quality(), 0, 0
    tensors = {}
    for name, quality in qualities.items():
        own_parameters, own_size = math.prod(index[name]["shape"]), _stored_bytes(name, index[name])
        tensors[name] = _figures(own_parameters, own_size, quality)
        total.add(quality.signal, quality.error)
        parameters, size = parameters + own_parameters, size + own_size
    return {"recipe": recipe.name, "tensors": tensors, "total": _figures(parameters, size, total)}


def _figures(parameters: int, size: int, quality: Quality) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "bytes": size,
        "bits_per_weight": round(8 * size / parameters, 4),
        "snr_db": quality.snr_db,
    }


def _stored_bytes(name: str, entry: dict[str, Any]) -> int:
    parts = stored_parts(name, entry).values()
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in parts)
