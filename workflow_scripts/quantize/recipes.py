"""Weight recipes as data: how every matrix of a model is stored.

A recipe names one encoding per kind of matrix, see `kinds.py`. A new recipe is one entry here; a new way of storing is
a new encoding class here, a function in `encode.py` and a kind of entry in `weights.py`.

Every encoding has a floor: a tensor whose signal-to-noise ratio falls below its `snr_floor_db` is refused by name,
since no later gate could name it. This catches weights that float16 cannot resolve: below 6e-5 its numbers are 6e-8
apart, so normal weights of standard deviation 1e-6 keep only 35 dB in any float16 storage, and 1e-7 only 15 dB
(measured).

A floor of codes lies about one bit (6 dB) below what was measured of the heaviest tails, Student's t with 3 degrees of
freedom: so a tensor that lost more than a bit of its codes is refused, and no trained one should be.
"""

import difflib
from dataclasses import dataclass

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.kinds import KINDS, matrix_kind


@dataclass(frozen=True)
class DenseEncoding:
    """Plain numbers: `dtype` is float16 or float32."""

    dtype: str
    snr_floor_db: float


@dataclass(frozen=True)
class PaletteEncoding:
    """Indices of `bits` bits into a float16 codebook of 2**bits entries per `group_size` output rows.

    Before the entries are rounded to float16, the squared error is at most 1 + `tolerance` times the least of any
    2**bits real ones; with 0 it is the least.
    """

    bits: int
    group_size: int
    tolerance: float
    snr_floor_db: float


@dataclass(frozen=True)
class LinearEncoding:
    """Symmetric integers of `bits` bits, with a float16 step per block of `block_size` along a row.

    `scheme` says where the steps come from: `clipping` and `symmetric` (see `linear.py`) set them, `qat` finds those
    that the checkpoint was trained with (see `qat_grid.py`; 4 bits).
    """

    bits: int
    block_size: int
    scheme: str
    snr_floor_db: float


Encoding = DenseEncoding | PaletteEncoding | LinearEncoding


@dataclass(frozen=True)
class Recipe:
    """Kind of matrix -> how it is stored."""

    name: str
    encodings: dict[str, Encoding]

    def encoding(self, tensor: str) -> Encoding:
        """How the matrix of a canonical tensor name is stored."""
        return self.encodings[matrix_kind(tensor)]


def _uniform(encoding: Encoding) -> dict[str, Encoding]:
    return dict.fromkeys(KINDS, encoding)


FLOAT32 = DenseEncoding("float32", snr_floor_db=140.0)  # exact for every stored dtype
# What 8-bit palettes reach on normal weights: a float16 copy below it is not worth its bytes.
FLOAT16 = DenseEncoding("float16", snr_floor_db=44.0)
# 44.5 dB on normal, 42.7 on Laplace, 41.5 on Student-t weights with 3 degrees of freedom (measured, K = 1536). The
# tolerance saves some 30% of the time; the error is then 0.01 to 0.25% above the optimum (measured).
PALETTE8 = PaletteEncoding(bits=8, group_size=32, tolerance=0.005, snr_floor_db=36.0)
PALETTE8_OPTIMAL = PaletteEncoding(bits=8, group_size=32, tolerance=0.0, snr_floor_db=36.0)
# 20.2, 18.2 and 15.4 dB (measured, K = 1536).
PALETTE4 = PaletteEncoding(bits=4, group_size=32, tolerance=0.0, snr_floor_db=10.0)
# Both schemes: 20.3 dB on normal, 18.3 on Laplace, 16.8 on Student-t weights with 3 degrees of freedom; at 8 bits 45.1,
# 43.1 and 41.1 (measured).
LINEAR4 = LinearEncoding(bits=4, block_size=32, scheme="clipping", snr_floor_db=10.0)
LINEAR4_SYMMETRIC = LinearEncoding(bits=4, block_size=32, scheme="symmetric", snr_floor_db=10.0)
LINEAR8 = LinearEncoding(bits=8, block_size=32, scheme="clipping", snr_floor_db=36.0)
# What is lost is the rounding of the checkpoint's own numbers, 2^-8 of each at most, and that of a step to float16,
# 2^-11: 47 dB. Three more are for steps below 2^-14, which float16 rounds more coarsely.
QAT4 = LinearEncoding(bits=4, block_size=32, scheme="qat", snr_floor_db=44.0)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", _uniform(FLOAT32)),
        Recipe("fp16", _uniform(FLOAT16)),
        Recipe("int8-kmeans-g32", _uniform(PALETTE8)),
        Recipe("int8-kmeans-g32-optimal", _uniform(PALETTE8_OPTIMAL)),
        # 4-bit palettes in the whole core keep at best 6 of 8 tokens (published): the rest, a fifth of it, is float16.
        Recipe("int4-kmeans-g32", {"mlp": PALETTE4, "head": PALETTE4, "other": FLOAT16}),
        Recipe("int4-linear-b32", _uniform(LINEAR4)),
        Recipe("int4-linear-b32-sym", _uniform(LINEAR4_SYMMETRIC)),
        Recipe("int8-linear-b32", _uniform(LINEAR8)),
        # Only for checkpoints from quantization-aware training: their own 4-bit numbers.
        Recipe("int4-qat-b32", _uniform(QAT4)),
    )
}


def get_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises UserError naming the nearest one."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.3)
    hint = f"did you mean `{near[0]}`? " if near else ""
    raise UserError(f"there is no weight recipe `{name}`: {hint}known are {', '.join(RECIPES)}")
