"""The packed layout against its definition bit by bit, in Python integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from workflow_scripts.kernels.packing import pack, unpack


@st.composite
def codes(draw):
    bits = draw(st.sampled_from([4, 8]))
    shape = draw(st.integers(1, 5)), 32 // bits * draw(st.integers(1, 6))
    return bits, draw(arrays(np.uint8, shape, elements=st.integers(0, (1 << bits) - 1)))


def word_by_definition(row, bits, word):
    """Code k stands `bits * (k mod codes per word)` bits above the lowest of its word."""
    per_word = 32 // bits
    return sum(int(row[word * per_word + place]) << (bits * place) for place in range(per_word))


@settings(max_examples=100)
@given(codes())
def test_every_word_is_as_defined_and_comes_back(case):
    bits, indices = case
    words = pack(indices, bits)
    assert words.dtype == np.dtype("<i4")
    expected = [
        [word_by_definition(row, bits, word) for word in range(len(row) * bits // 32)] for row in indices
    ]
    np.testing.assert_array_equal(words.view("<u4"), expected)
    np.testing.assert_array_equal(unpack(words, bits), indices)


@pytest.mark.parametrize("bits", [4, 8])
def test_each_single_bit_goes_to_its_place(bits):
    for bit in range(32):
        indices = np.zeros((1, 32 // bits), np.uint8)
        indices[0, bit // bits] = 1 << (bit % bits)
        assert pack(indices, bits).view("<u4").tolist() == [[1 << bit]]
        assert pack(indices, bits).tobytes() == (1 << bit).to_bytes(4, "little")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "layout", [np.asfortranarray, lambda a: np.repeat(a, 2, 0)[::2], np.ascontiguousarray]
)
def test_the_memory_order_of_the_codes_does_not_matter(bits, layout):
    indices = np.random.default_rng(0).integers(0, 1 << bits, (3, 64), np.uint8)
    np.testing.assert_array_equal(pack(layout(indices), bits), pack(indices, bits))
    np.testing.assert_array_equal(unpack(layout(pack(indices, bits)), bits), indices)


def test_bytes_are_not_copied():
    """The words of an 8-bit head are 400 MB of a mapped file."""
    indices = np.zeros((2, 32), np.uint8)
    assert np.shares_memory(pack(indices, 8), indices)


@pytest.mark.parametrize(
    ("indices", "bits", "message"),
    [
        (np.zeros((2, 32), np.uint8), 6, "6 bits have no packed layout"),
        (np.zeros((2, 12), np.uint8), 4, "K a multiple of 8"),
        (np.zeros((2, 6), np.uint8), 8, "K a multiple of 4"),
        (np.zeros((2, 32), np.int32), 8, "not from int32"),
        (np.full((2, 32), 16, np.uint8), 4, "code 16 does not fit 4 bits"),
    ],
)
def test_what_has_no_layout_is_refused(indices, bits, message):
    with pytest.raises(ValueError, match=message):
        pack(indices, bits)
