"""Codes that are not the nearest, and steps that are not the scheme's, are found in any encoding; right ones pass."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from workflow_scripts.gates.stored_codes import beyond_code, kept_to_the_bit, off_means
from workflow_scripts.quantize.linear import quantize_linear
from workflow_scripts.quantize.palette import palettize
from workflow_scripts.quantize.qat_grid import recover_grid
from workflow_scripts.quantize.recipes import (
    FLOAT16,
    LINEAR4,
    LINEAR4_SYMMETRIC,
    LINEAR8,
    PALETTE4,
    PALETTE8,
    QAT4,
    LinearEncoding,
    PaletteEncoding,
)
from workflow_scripts.quantize.weights import Dense, Linear, Palette

ENCODINGS = [FLOAT16, LINEAR4, LINEAR4_SYMMETRIC, LINEAR8, PALETTE4, PALETTE8, QAT4]
CODED = [encoding for encoding in ENCODINGS if encoding != FLOAT16]
ALL = slice(0, 64)


def matrix(encoding):
    """Weights [64, 96] as a checkpoint has them, in bfloat16; for QAT4 on a grid."""
    rng = np.random.default_rng(7)
    if encoding == QAT4:
        codes, steps = rng.integers(-8, 8, (64, 96)), rng.uniform(0.001, 0.01, (64, 3)).astype(np.float32)
        values = codes * np.repeat(steps, 32, axis=1)
    else:
        values = rng.normal(0, 0.02, (64, 96))
    return values.astype(ml_dtypes.bfloat16)


def stored(encoding):
    """The encoding of `matrix`, by the quantizers themselves."""
    weights = matrix(encoding)
    if isinstance(encoding, PaletteEncoding):
        block = palettize(weights, encoding.bits, 32, "w", encoding.tolerance)
        return Palette(block.indices, block.codebook, 32, encoding.bits)
    if isinstance(encoding, LinearEncoding):
        rows = weights.astype(np.float32)
        qat = encoding.scheme == "qat"
        block = (
            recover_grid(rows, 32, "w")
            if qat
            else quantize_linear(rows, encoding.bits, encoding.scheme, 32, "w")
        )
        return Linear(block.codes, block.steps, 32, encoding.bits)
    return Dense(weights.astype(np.float16))


def beyond(encoding, changed=None):
    return beyond_code(changed or stored(encoding), encoding, ALL, matrix(encoding).astype(np.float64))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_what_the_quantizers_make_passes(encoding):
    assert beyond(encoding) <= 0
    part = slice(32, 64)
    assert beyond_code(stored(encoding), encoding, part, matrix(encoding)[part].astype(np.float64)) <= 0


@pytest.mark.parametrize("encoding", CODED, ids=str)
def test_one_code_off_by_one_is_found(encoding):
    right = stored(encoding)
    name = "indices" if isinstance(right, Palette) else "codes"
    codes = getattr(right, name).copy()
    codes[40, 50] = codes[40, 50] - 1 if codes[40, 50] > 0 else codes[40, 50] + 1
    assert beyond(encoding, replace(right, **{name: codes})) > 0


@pytest.mark.parametrize("encoding", [LINEAR4, LINEAR4_SYMMETRIC, LINEAR8], ids=str)
@pytest.mark.parametrize("factor", [0.8, 1.5])
def test_other_steps_are_found_though_every_code_is_the_nearest(encoding, factor):
    right, rows = stored(encoding), matrix(encoding).astype(np.float32)
    steps = (right.steps.astype(np.float32) * np.float32(factor)).astype(np.float16)
    highest = (1 << (encoding.bits - 1)) - 1
    codes = np.rint(rows / np.repeat(steps.astype(np.float32), 32, axis=1)).clip(-highest, highest)
    assert beyond(encoding, Linear(codes.astype(np.int8), steps, 32, encoding.bits)) > 0


def test_a_codebook_that_descends_is_found():
    right = stored(PALETTE4)
    turned = Palette(15 - right.indices, right.codebook[:, ::-1].copy(), 32, 4)
    np.testing.assert_array_equal(turned.dequantize(), right.dequantize())
    assert beyond(PALETTE4, turned) == np.inf


def evenly_spaced(weights, bits):
    """Palettes that leave every weight its nearest entry, and are no k-means."""
    books, indices = [], []
    for values in weights.reshape(2, 32, 96):
        even = np.linspace(values.min(), values.max(), 1 << bits).astype(np.float16)
        indices.append(np.abs(values[..., None] - even.astype(np.float64)).argmin(-1))
        books.append(even)
    return Palette(np.concatenate(indices).astype(np.uint8), np.stack(books), 32, bits)


@pytest.mark.parametrize("encoding", [PALETTE4, PALETTE8, replace(PALETTE8, tolerance=0.0)], ids=str)
def test_palettes_that_are_no_means_of_their_weights_are_found(encoding):
    weights = matrix(encoding).astype(np.float64)
    assert off_means(stored(encoding), encoding.tolerance, ALL, weights) < 0.5
    even = evenly_spaced(weights, encoding.bits)
    assert beyond(encoding, even) <= 0
    assert off_means(even, encoding.tolerance, ALL, weights) > 2
    one = stored(encoding)
    one.codebook[1, 3] = one.codebook[1, 2]  # one palette of two, one entry of all
    assert off_means(one, encoding.tolerance, ALL, weights) > 1


def test_palettes_of_so_few_values_that_all_are_kept_are_means():
    weights = np.tile(np.array([-0.5, 0.25, 1.0]), (32, 8))
    block = palettize(weights.astype(np.float32), 4, 32, "w")
    assert off_means(Palette(block.indices, block.codebook, 32, 4), 0.0, slice(0, 32), weights) == 0


def test_steps_off_the_grid_keep_fewer_weights_to_the_bit():
    right, weights = stored(QAT4), matrix(QAT4).astype(np.float64)
    off = replace(right, steps=(right.steps.astype(np.float32) * np.float32(1.004)).astype(np.float16))
    assert kept_to_the_bit(right, ALL, weights) > 0.95 * weights.size
    assert kept_to_the_bit(off, ALL, weights) < 0.8 * weights.size
