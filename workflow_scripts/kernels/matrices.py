"""Which matrices the kernels can take."""

from workflow_scripts.errors import UserError
from workflow_scripts.kernels.packing import GROUP_ROWS
from workflow_scripts.quantize.weights import Palette, Weights

_LANES = 32


def kernel_matrix(weights: Weights, name: str, bits: int) -> Palette:
    """The palette of a matrix [N, K].

    Raises UserError naming the tensor where it is no palette of `bits` bits in groups of 32 rows, or where N or K is
    no multiple of 32.
    """
    stored = weights.linear(name)
    if not (isinstance(stored, Palette) and stored.bits == bits and stored.group_size == GROUP_ROWS):
        raise UserError(
            f"{name} is stored in recipe {weights.recipe}, but the kernel reads palettes of {bits} bits in groups "
            f"of {GROUP_ROWS} rows: choose such a recipe for this artifact"
        )
    rows, columns = stored.indices.shape
    if rows % GROUP_ROWS or columns % _LANES:
        raise UserError(
            f"{name} has the shape [{rows}, {columns}], but the kernel needs multiples of {GROUP_ROWS}: "
            "use the form without kernels for this model"
        )
    return stored
