"""The weights that the benches of saving and of gates share: matrices of 8-bit palettes in files, to be mapped."""

from pathlib import Path

import numpy as np

from workflow_scripts.quantize.weights import Palette

SHAPE = (12288, 1536)  # E2B's up and gate projections
MATRICES = 12  # a bundle of 231 MB
_BITS, _GROUP_SIZE = 8, 32


def draw_palettes(home: Path, count: int, shape: tuple[int, int]) -> None:
    """Write codes and codebooks of `count` matrices into `home`."""
    random = np.random.default_rng(0)
    for number in range(count):
        random.integers(0, 1 << _BITS, shape, np.uint8).tofile(home / f"{number}.codes")
        books = random.standard_normal((shape[0] // _GROUP_SIZE, 1 << _BITS)) * 0.02
        np.sort(books, axis=1).astype(np.float16).tofile(home / f"{number}.codebook")


def map_palettes(home: Path, count: int, shape: tuple[int, int]) -> list[Palette]:
    """The matrices of `draw_palettes`, their codes mapped as an export has them."""
    books = (shape[0] // _GROUP_SIZE, 1 << _BITS)
    return [
        Palette(
            np.asarray(np.memmap(home / f"{number}.codes", np.uint8, "c", shape=shape)),
            np.fromfile(home / f"{number}.codebook", np.float16).reshape(books),
            group_size=_GROUP_SIZE,
            bits=_BITS,
        )
        for number in range(count)
    ]
