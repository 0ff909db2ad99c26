"""Makes the quantized weights of a checkpoint. `weights.py` reads them, so that exports do not depend on this code."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import SafetensorsWriter
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.progress import track
from workflow_scripts.quantize.encode import describe, encode, shipped_bytes
from workflow_scripts.quantize.kinds import HEAD, KINDS, matrix_kind
from workflow_scripts.quantize.quality import GridFit, Quality
from workflow_scripts.quantize.recipes import Recipe
from workflow_scripts.quantize.weights import FORMAT, INDEX, stored_parts

Index = dict[str, dict[str, Any]]


def write_weights(checkpoint: Checkpoint, recipe: Recipe, out: Path, threads: int = 1) -> None:
    """Fill the folder `out` with `core.safetensors`, `head.safetensors`, `weights.json` and `report.json`.

    Streams: blocks of rows of one tensor are in memory, two per thread at most. The bytes do not depend on `threads`.
    Raises UserError naming the tensor where the recipe does not suit its shape, a weight is not finite, or more is lost
    than the recipe allows.
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
                    qualities[name] = _matrix(checkpoint, name, recipe, writer, threads)
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
    return describe(name, shape, recipe.encoding(name))


def _vector(checkpoint: Checkpoint, name: str) -> np.ndarray:
    vector = checkpoint.float32(name)
    if not np.isfinite(vector).all():
        raise UserError(f"{name} holds a value that is infinite or not a number: the checkpoint is damaged")
    return vector


def _matrix(
    checkpoint: Checkpoint, name: str, recipe: Recipe, writer: SafetensorsWriter, threads: int
) -> Quality:
    encoding = recipe.encoding(name)
    quality = encode(checkpoint, name, encoding, writer, threads)
    if quality.snr_db is not None and quality.snr_db < encoding.snr_floor_db:
        raise UserError(
            f"{name} keeps a signal-to-noise ratio of only {quality.snr_db} dB in recipe {recipe.name}, which must "
            f"keep {encoding.snr_floor_db} there: its weights are too small or too unusual for it; use recipe fp32"
        )
    return quality


def _report(recipe: Recipe, index: Index, qualities: dict[str, Quality]) -> dict[str, Any]:
    """Figures of every matrix with its encoding, of each kind of matrix, and in total."""
    names = list(qualities)
    kinds = {kind: [name for name in names if matrix_kind(name) == kind] for kind in KINDS}
    return {
        "recipe": recipe.name,
        "tensors": {
            name: {"encoding": _encoding(index[name])} | _figures([name], index, qualities) for name in names
        },
        "kinds": {kind: _figures(members, index, qualities) for kind, members in kinds.items()},
        "total": _figures(names, index, qualities),
    }


def _encoding(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in ("file", "shape")}


def _figures(names: list[str], index: Index, qualities: dict[str, Quality]) -> dict[str, Any]:
    """Of some matrices together: parameters, bytes and bits per weight as shipped, SNR in dB (null: stored exactly).

    Where all lie on grids, also the share of weights that are kept to the bit, and the largest deviation in steps.
    """
    parameters = sum(math.prod(index[name]["shape"]) for name in names)
    size = sum(shipped_bytes(index[name]) for name in names)
    quality = Quality()
    for name in names:
        quality.add(qualities[name].signal, qualities[name].error)
    fits = [qualities[name].fit for name in names]
    return _fit_figures(fits) | {
        "parameters": parameters,
        "bytes": size,
        "bits_per_weight": round(8 * size / parameters, 4),
        "snr_db": quality.snr_db,
    }


def _fit_figures(fits: list[GridFit | None]) -> dict[str, Any]:
    if None in fits:
        return {}
    fit = sum(fits, GridFit())
    return {"exact_share": round(fit.exact / fit.weights, 6), "largest_deviation": round(fit.deviation, 6)}
