"""Weight recipes as data: how every matrix of a model is stored.

A new recipe is one entry here; a new way of storing is a new encoding class here, a function in `encode.py`
and a kind in `weights.py`.
"""

import difflib
from dataclasses import dataclass

from workflow_scripts.errors import UserError


@dataclass(frozen=True)
class DenseEncoding:
    """Plain numbers: `dtype` is float16 or float32."""

    dtype: str


@dataclass(frozen=True)
class PaletteEncoding:
    """Indices of `bits` bits into a float16 codebook of 2**bits entries per `group_size` output rows."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Recipe:
    """One encoding for all layer matrices and the head.

    A tensor whose signal-to-noise ratio falls below `snr_floor_db` is refused by name, since no later gate could name
    it. This catches weights that float16 cannot resolve: below 6e-5 its numbers are 6e-8 apart, so normal weights of
    standard deviation 1e-6 keep only 35 dB in any float16 storage, and 1e-7 only 15 dB (measured).
    """

    name: str
    encoding: DenseEncoding | PaletteEncoding
    snr_floor_db: float


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", DenseEncoding("float32"), snr_floor_db=140.0),  # exact for every stored dtype
        # What 8-bit palettes reach on normal weights: a float16 copy below it is not worth its bytes.
        Recipe("fp16", DenseEncoding("float16"), snr_floor_db=44.0),
        # 44.9 dB on normal, 43.3 on Laplace, 42.5 on Student-t weights with 3 degrees of freedom (measured).
        Recipe("int8-kmeans-g32", PaletteEncoding(bits=8, group_size=32), snr_floor_db=36.0),
        # 20.3 dB on normal, 18.2 on Laplace, 15.2 on Student-t weights with 3 degrees of freedom (measured, K = 1536).
        Recipe("int4-kmeans-g32", PaletteEncoding(bits=4, group_size=32), snr_floor_db=10.0),
    )
}


def get_recipe(name: str) -> Recipe:
    """The recipe of a name. Raises UserError naming the nearest one."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.3)
    hint = f"did you mean `{near[0]}`? " if near else ""
    raise UserError(f"there is no weight recipe `{name}`: {hint}known are {', '.join(RECIPES)}")
