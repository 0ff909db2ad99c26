"""The packed layout of palette codes, as the kernels read them: the one place that knows it.

Along a row, 32 / bits neighbouring codes share one 32-bit word; the lowest k lies in the lowest bits. The words
are stored little-endian, so four 8-bit codes are just four bytes in order. Words are int32: torch has no shifts for
uint32. A kernel casts each word to `uint` and sees the same bits.
"""

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.scratch import Scratch

WORD_BITS = 32
GROUP_ROWS = 32
"""Rows of one palette group and of one threadgroup: a threadgroup stages exactly one codebook row."""

_WORD = np.dtype("<i4")


def pack(indices: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [N, K], each below 2**bits -> int32 words [N, K * bits / 32].

    8-bit codes are not copied: the words are a view of their bytes. Raises ValueError for a width other than 4 and 8,
    for a K that fills no whole words, and for a code that is too large.
    """
    per_word = _codes_per_word(bits)
    if indices.dtype != np.uint8 or indices.ndim != 2 or indices.shape[1] % per_word:
        raise ValueError(
            f"{bits}-bit codes are packed from uint8 [N, K] with K a multiple of {per_word}, "
            f"not from {indices.dtype} {list(indices.shape)}"
        )
    if bits == 8:
        return np.ascontiguousarray(indices).view(_WORD)
    if indices.max(initial=0) >> bits:
        raise ValueError(f"code {indices.max()} does not fit {bits} bits")
    return np.ascontiguousarray(indices[:, 0::2] | indices[:, 1::2] << 4).view(_WORD)


def packed_in(scratch: Scratch, indices: np.ndarray, bits: int) -> np.ndarray:
    """As `pack`, with 4-bit words on the disk of `scratch` instead of in memory."""
    if bits == 8:
        return pack(indices, bits)
    blocks = (pack(indices[rows], bits) for rows in row_blocks(indices.shape))
    return scratch.array(blocks, (len(indices), indices.shape[1] // _codes_per_word(bits)), _WORD)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of `pack`: int32 words [N, K * bits / 32] -> codes uint8 [N, K]."""
    _codes_per_word(bits)
    packed = np.ascontiguousarray(words.astype(_WORD, copy=False)).view(np.uint8)
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _codes_per_word(bits: int) -> int:
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits have no packed layout: it is defined for 4 and 8")
    return WORD_BITS // bits
