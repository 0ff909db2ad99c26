"""Quantized weights, as every export reads them: memory-mapped, one artifact per recipe.

A result of stage `weights` holds `core.safetensors` (layer matrices and all vectors), `head.safetensors`
(the token embedding, tied), `weights.json` (recipe, configuration, index of tensors) and `report.json` (quality).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.safetensors import TensorInfo, map_tensor, read_header
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError

INDEX = "weights.json"
FORMAT = 1


@dataclass(frozen=True)
class Dense:
    """A matrix as plain numbers: `array` [N, K], float16 or float32."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.array.shape

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """Rows as a new float32 array."""
        return self.array[rows].astype(np.float32)


@dataclass(frozen=True)
class Palette:
    """A palettized matrix: weight [n, k] is `codebook[n // group_size, indices[n, k]]`.

    `indices` uint8 [N, K], each below 2**bits; `codebook` float16 [N / group_size, 2**bits], each row ascending.
    """

    indices: np.ndarray
    codebook: np.ndarray
    group_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.indices.shape

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """Rows as a new float32 array; beside it, only one group's rows are held at a time."""
        start, stop, stride = rows.indices(len(self.indices))
        if stride != 1:
            raise ValueError("rows are dequantized in order, without gaps")
        out = np.empty((max(stop - start, 0), self.indices.shape[1]), np.float32)
        for row in range(start - start % self.group_size, stop, self.group_size):
            span = slice(max(row, start), min(row + self.group_size, stop))
            entries = self.codebook[row // self.group_size].astype(np.float32)
            out[span.start - start : span.stop - start] = entries[self.indices[span]]
        return out


@dataclass(frozen=True)
class Linear:
    """A linearly quantized matrix: weight [n, k] is `codes[n, k] * steps[n, k // block_size]`.

    `codes` int8 [N, K], signed numbers of `bits` bits; `steps` float16 [N, K / block_size].
    """

    codes: np.ndarray
    steps: np.ndarray
    block_size: int
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.codes.shape

    def dequantize(self, rows: slice = slice(None)) -> np.ndarray:
        """Rows as a new float32 array: exact, a product has at most 8 + 11 bits."""
        codes, steps = self.codes[rows], self.steps[rows]
        blocks = codes.astype(np.float32).reshape(*steps.shape, self.block_size)
        blocks *= steps.astype(np.float32)[:, :, None]
        return blocks.reshape(codes.shape)


Matrix = Dense | Palette | Linear


def expanded_blocks(matrix: Matrix) -> Iterator[np.ndarray]:
    """The rows in their order as float32 arrays, some at a time: a head in float32 has 1.6 GB for E2B."""
    for rows in row_blocks(matrix.shape):
        yield matrix.dequantize(rows)


@dataclass(frozen=True)
class Weights:
    """The weights of one model in one recipe. `checkpoint_digest` is the identity of what they were made from."""

    config: TextConfig
    recipe: str
    checkpoint_digest: str
    index: dict[str, dict[str, Any]]
    stored: dict[str, TensorInfo]
    tree: Path

    @classmethod
    def open(cls, tree: Path) -> Self:
        """Open a result folder of stage `weights`; nothing but headers is read.

        Raises UserError naming the file where it is missing, unreadable, or does not fit the index.
        """
        record = _read_index(tree / INDEX)
        files = sorted({entry["file"] for entry in record["tensors"].values()})
        stored = {name: info for file in files for name, info in read_header(tree / file).items()}
        weights = cls(
            TextConfig.from_json(record["text_config"]),
            record["recipe"],
            record["checkpoint"],
            record["tensors"],
            stored,
            tree,
        )
        for name, entry in weights.index.items():
            for part, dtype_and_shape in stored_parts(name, entry).items():
                info = stored.get(part)
                if info is None or (info.dtype, info.shape) != dtype_and_shape:
                    raise UserError(
                        f"{tree / entry['file']} does not hold {part} as {INDEX} says: build the weights again"
                    )
        return weights

    def linear(self, name: str) -> Matrix:
        """A layer matrix, or `embed_tokens.weight` for the head. Raises UserError where there is no such matrix."""
        entry = self._entry(name, ("dense", "palette", "linear"))
        if entry["kind"] == "dense":
            return Dense(map_tensor(self.stored[name]))
        if entry["kind"] == "linear":
            return Linear(
                map_tensor(self.stored[f"{name}.codes"]),
                map_tensor(self.stored[f"{name}.steps"]),
                block_size=entry["block_size"],
                bits=entry["bits"],
            )
        return Palette(
            map_tensor(self.stored[f"{name}.indices"]),
            map_tensor(self.stored[f"{name}.codebook"]),
            group_size=entry["group_size"],
            bits=entry["bits"],
        )

    def vector(self, name: str) -> np.ndarray:
        """A norm's weight or a layer's scalar, float32. Raises UserError where there is no such vector."""
        self._entry(name, ("vector",))
        return map_tensor(self.stored[name])

    def _entry(self, name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
        entry = self.index.get(name)
        if entry is None or entry["kind"] not in kinds:
            raise UserError(f"{self.tree / INDEX} lists no tensor {name} of kind {' or '.join(kinds)}")
        return entry


def stored_parts(name: str, entry: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Stored tensors (safetensors dtype, shape) of an entry of the index, in their order in the file."""
    shape = tuple(entry["shape"])
    if entry["kind"] == "linear":
        return {
            f"{name}.codes": ("I8", shape),
            f"{name}.steps": ("F16", (shape[0], shape[1] // entry["block_size"])),
        }
    if entry["kind"] != "palette":
        return {name: (entry["dtype"], shape)}
    return {
        f"{name}.indices": ("U8", shape),
        f"{name}.codebook": ("F16", (shape[0] // entry["group_size"], 1 << entry["bits"])),
    }


def _read_index(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} holds no quantized weights: it has no {path.name}") from None
    except ValueError:
        raise UserError(f"{path} is not readable JSON: build the weights again") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: build the weights again")
    return record
