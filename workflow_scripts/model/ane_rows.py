"""How the head for the Neural Engine cuts its matrix into rows; apart from torch, since gates need it, too."""

from workflow_scripts.quantize.weights import Dense, Palette

BLOCK_ROWS = 16384
"""Most rows of one convolution: an axis of the engine has no more."""


def rows_of(matrix: Dense | Palette, first: int, last: int) -> Dense | Palette:
    """Rows [first, last) of a stored matrix; both are multiples of a palette's group size."""
    if isinstance(matrix, Dense):
        return Dense(matrix.array[first:last])
    groups = slice(first // matrix.group_size, last // matrix.group_size)
    return Palette(matrix.indices[first:last], matrix.codebook[groups], matrix.group_size, matrix.bits)
