"""Which large constants a bundle must hold: every stored tensor by the name of its content.

Constants under 256 elements and constants of one repeated value stand inside the program's text (see
`coreai/private.py`), so they are not listed.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.gates.structure import Width, named
from workflow_scripts.kernels.packing import WORD_BITS, pack
from workflow_scripts.model.frequencies import inverse_frequencies
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.progress import track
from workflow_scripts.quantize.kinds import matrix_kind
from workflow_scripts.quantize.recipes import (
    DenseEncoding,
    Encoding,
    LinearEncoding,
    PaletteEncoding,
    get_recipe,
)
from workflow_scripts.quantize.weights import Dense, Linear, Matrix, Palette, Weights
from workflow_scripts.tables.raw import RawTables

_INLINE_LIMIT = 256
_BYTE, _WORD = np.dtype(np.uint8), np.dtype(f"<i{WORD_BITS // 8}")
CORES = ("hostcache_core", "hostcache_metal")
"""Graph forms with everything but the head."""
# Graph form -> kinds of matrices that its Metal kernels read.
_IN_KERNELS = {"hostcache_metal": frozenset({"mlp"}), "head_argmax_metal": frozenset({"head"})}
Stored = dict[str, tuple[str, int]]
"""Content name -> (tensor, bytes)."""


class Held(NamedTuple):
    """What a bundle holds of weights, as `structure.Claim` takes it: all constants, and the width of each kind."""

    constants: Stored
    widths: dict[str, Width]


def bundle_constants(form: str, weights: Weights, compute: str) -> Held:
    """Constants of a core, which are all matrices and vectors but the head, or of a head."""
    names = [name for name in weights.index if (name != HEAD_WEIGHT) == (form in CORES)]
    in_kernels = _IN_KERNELS.get(form, frozenset())
    return held(weights, weight_constants(weights, names, compute, in_kernels), compute, in_kernels)


def frontend_constants(tables: RawTables) -> Stored:
    """Constants of a front end: the very rows of the raw tables, in int8."""
    arrays = {
        "embed rows": tables.embed_rows,
        "embed scale": tables.embed_scale,
        "per-layer rows": tables.per_layer_rows,
        "per-layer scale": tables.per_layer_scale,
        "projection": tables.projection,
        "projection norm": tables.projection_norm,
    }
    return by_content((name, Cast(arrays[name])) for name in track(arrays, "hash tables", len(arrays)))


def rotary_constants(config: TextConfig) -> frozenset[str]:
    """Content names of the rotary inverse frequencies of a core, as far as they are large: at E2B's head_dim of 512."""
    specs = {
        (config.rope[kind], config.layer_head_dim(layer)) for layer, kind in enumerate(config.layer_types)
    }
    arrays = [inverse_frequencies(rope, head_dim) for rope, head_dim in specs]
    return frozenset(by_content(("inverse frequencies", Cast(array)) for array in arrays))


class Constant(Protocol):
    """A constant whose elements can be had block by block, in C order, as one-dimensional arrays."""

    @property
    def size(self) -> int:
        """Number of its elements."""

    @property
    def nbytes(self) -> int:
        """Number of its bytes."""

    def blocks(self) -> Iterator[np.ndarray]:
        """Its elements."""


@dataclass(frozen=True)
class Cast:
    """An array in another dtype, converted where its bytes are wanted."""

    array: np.ndarray
    dtype: np.dtype | None = None

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        """Bytes in the other dtype."""
        return self.array.size * (self.dtype or self.array.dtype).itemsize

    def blocks(self) -> Iterator[np.ndarray]:
        """Its elements in the other dtype."""
        flat = self.array.reshape(-1)
        for block in row_blocks(flat.shape):
            yield flat[block].astype(self.dtype or flat.dtype, copy=False)


@dataclass(frozen=True)
class Packed:
    """Codes of 4 or 8 bits without gaps, in elements of `dtype`; the bytes are the same for every dtype.

    `codes` [N, K] are uint8, or int8 in two's complement of that width.
    """

    codes: np.ndarray
    bits: int
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.nbytes // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.codes.size * self.bits // 8

    def blocks(self) -> Iterator[np.ndarray]:
        """Its elements."""
        for rows in row_blocks(self.codes.shape):
            codes = self.codes[rows]
            if codes.dtype == np.int8:
                codes = codes.view(np.uint8) & ((1 << self.bits) - 1)
            yield pack(codes, self.bits).view(self.dtype).reshape(-1)


def in_text(constant: Constant) -> bool:
    """Whether a constant stands in the program's text: it is small, or one value repeated."""
    if constant.size < _INLINE_LIMIT:
        return True
    # The first block decides for nearly every tensor: a comparison of E2B's whole table would take 2.3 GB.
    first = next(constant.blocks())[0]
    return all((block == first).all() for block in constant.blocks())


def content_name(constant: Constant) -> str:
    """The name of a constant's content, see `structure.content_name`."""
    digest = hashlib.sha256()
    for block in constant.blocks():
        digest.update(block.data)
    return named(digest.hexdigest())


def weight_constants(
    weights: Weights, names: Collection[str], compute: str, in_kernels: Set[str] = frozenset()
) -> Iterator[tuple[str, Constant]]:
    """The constants of some tensors by label: the tensor's canonical name, and behind it perhaps a part's.

    Codes keep their width; codebooks, steps and dense values are in the compute type, vectors in float32.
    The kinds of matrices in kernels are 32-bit words, and their codebooks are float16 in every compute type.
    """
    dtype = np.dtype(COMPUTE_DTYPES[compute])
    for name in track(names, "hash stored weights", len(names)):
        if weights.index[name]["kind"] == "vector":
            yield name, Cast(weights.vector(name))
            continue
        stored = weights.linear(name)
        if matrix_kind(name) in in_kernels and isinstance(stored, Palette):
            yield f"{name} (indices)", Packed(stored.indices, stored.bits, _WORD)
            yield f"{name} (codebook)", Cast(stored.codebook)
        else:
            yield from matrix_constants(name, stored, dtype)


def matrix_constants(name: str, stored: Matrix, dtype: np.dtype) -> Iterator[tuple[str, Constant]]:
    """What a stored matrix becomes where the graph's own operators read it: codes in bytes, all else in `dtype`."""
    match stored:
        case Dense():
            yield name, Cast(stored.array, dtype)
        case Palette():
            yield f"{name} (indices)", Packed(stored.indices, stored.bits, _BYTE)
            yield f"{name} (codebook)", Cast(stored.codebook, dtype)
        case Linear():
            yield f"{name} (codes)", Packed(stored.codes, stored.bits, _BYTE)
            yield f"{name} (steps)", Cast(stored.steps, dtype)


def by_content(constants: Iterable[tuple[str, Constant]]) -> Stored:
    """Of the constants by tensor those that a bundle holds by name, see the module."""
    return {
        content_name(constant): (name, constant.nbytes)
        for name, constant in constants
        if not in_text(constant)
    }


def held(
    weights: Weights,
    constants: Iterable[tuple[str, Constant]],
    compute: str,
    in_kernels: Set[str] = frozenset(),
) -> Held:
    """What a bundle holds of its constants by label, see `weight_constants`; other labels are of no matrix."""
    stored: Stored = {}
    parts: dict[str, list[tuple[str, str | None, int]]] = {}  # kind of matrix -> tensor, content name, bytes
    for label, constant in constants:
        name = None if in_text(constant) else content_name(constant)
        if name is not None:
            stored[name] = (label, constant.nbytes)
        tensor = label.partition(" ")[0]
        if weights.index.get(tensor, {"kind": "vector"})["kind"] != "vector":
            parts.setdefault(matrix_kind(tensor), []).append((tensor, name, constant.nbytes))
    value_bits = {kind: 16 if kind in in_kernels else _bits(COMPUTE_DTYPES[compute]) for kind in parts}
    return Held(stored, {kind: _width(weights, parts[kind], value_bits[kind]) for kind in parts})


def _width(weights: Weights, parts: list[tuple[str, str | None, int]], value_bits: int) -> Width:
    recipe = get_recipe(weights.recipe)
    shapes = {tensor: weights.index[tensor]["shape"] for tensor, _, _ in parts}
    counts = {tensor: math.prod(shape) for tensor, shape in shapes.items()}
    total = sum(
        counts[tensor] * bits_per_weight(recipe.encoding(tensor), shape, value_bits)
        for tensor, shape in shapes.items()
    )
    weights_in_all = sum(counts.values())
    return Width(
        total / weights_in_all,
        weights_in_all,
        tuple(name for _, name, _ in parts if name is not None),
        sum(size for _, name, size in parts if name is None),
    )


def bits_per_weight(encoding: Encoding, shape: Sequence[int], value_bits: int) -> float:
    """What an encoding spends on a weight of a matrix [N, K]; plain numbers, steps and entries have `value_bits`."""
    match encoding:
        case DenseEncoding():
            return value_bits
        case LinearEncoding():
            return encoding.bits + value_bits / encoding.block_size
        case PaletteEncoding():
            return encoding.bits + value_bits * (1 << encoding.bits) / (encoding.group_size * shape[1])


def _bits(dtype: str) -> int:
    return 8 * np.dtype(dtype).itemsize
