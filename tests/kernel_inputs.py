"""Small palettes that try the kernels, what they may get wrong, and how far float32 sums may be off."""

import itertools

import numpy as np
import torch

from tests.tiny import build_tiny
from workflow_scripts.kernels import (
    head_argmax_int4,
    head_argmax_int8,
    palette_matvec_int4,
    palette_matvec_int8,
)
from workflow_scripts.kernels.binding import PackedMatrix
from workflow_scripts.kernels.packing import pack
from workflow_scripts.manifest import manifest_path
from workflow_scripts.quantize.weights import Palette

MATVECS = {8: palette_matvec_int8, 4: palette_matvec_int4}
HEADS = {8: head_argmax_int8, 4: head_argmax_int4}
WIDTHS = [8, 4]
PAIRS = list(itertools.combinations(range(8), 2))


def random_checkpoint(run_stage, root, name, dims):
    """Inputs of the stage `weights`: a random model, published in `root` and checked."""
    build_tiny(root, dims)
    checkpoint = run_stage(
        "checkpoint",
        name,
        {"source": root / "published"},
        source="published",
        allow_moving_revision=False,
        sha256={},
        num_hidden_layers=len(dims.layer_types),
    )
    return {"checkpoint": manifest_path(checkpoint)}


def palette(codes, bits, seed=0):
    """Codes with an ascending codebook whose rows differ."""
    numbers = np.random.default_rng(seed)
    book = np.sort(numbers.normal(0, 0.1, (len(codes) // 32, 1 << bits)).astype(np.float16), 1)
    return Palette(codes.astype(np.uint8), book, 32, bits)


def packed(stored):
    return PackedMatrix(
        torch.from_numpy(pack(stored.indices, stored.bits)), torch.from_numpy(stored.codebook)
    )


def random_codes(bits, rows=64, columns=96, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns))


def single(bits, row, column):
    codes = np.zeros((64, 96), int)
    codes[row, column] = (1 << bits) - 1
    return codes


CODES = {
    "random": random_codes,
    "wide": lambda bits: random_codes(bits, 96, 288, 1),
    "all zero": lambda bits: np.zeros((64, 96), int),
    "all max": lambda bits: np.full((64, 96), (1 << bits) - 1),
    "first": lambda bits: single(bits, 0, 0),
    "last": lambda bits: single(bits, 63, 95),
    "between": lambda bits: single(bits, 32, 7),
}


def allowed(stored, x, dtype):
    """Error of a float32 sum of K products in any order, and one rounding to the compute type."""
    weight, x = stored.dequantize().astype(np.float64), x.astype(np.float64)
    summed = x.size * 2.0**-24 * (np.abs(weight) @ np.abs(x))
    return summed + (2.0**-11 * np.abs(weight @ x) + 2.0**-24 if dtype == "float16" else 0)


def tied_head(bits, pairs=PAIRS):
    """One tile per pair of rows whose scores are equal and the largest of the tile; the hidden state that sees it.

    A row's score is its first code's entry: the tied rows hold the largest code, the others smaller ones.
    """
    rows = -(-len(pairs) * 8 // 32) * 32
    codes = np.random.default_rng(3).integers(0, (1 << bits) - 1, (rows, 96))
    for tile, pair in enumerate(pairs):
        codes[[tile * 8 + place for place in pair], 0] = (1 << bits) - 1
    hidden = np.zeros(96, np.float32)
    hidden[0] = 1
    return palette(codes, bits), hidden
