"""Row blocks: how one goes through arrays of gigabytes with tens of megabytes of memory."""

import math
from collections.abc import Iterator

_VALUES = 1 << 20  # in work at once: 8 MB in float64


def row_blocks(shape: tuple[int, ...], values: int = _VALUES, multiple: int = 1) -> Iterator[slice]:
    """Slices of the first axis that cover an array in order, of about `values` values each.

    They begin at multiples of `multiple`.
    """
    size = max(1, values // max(1, math.prod(shape[1:]) * multiple)) * multiple
    for start in range(0, shape[0], size):
        yield slice(start, min(start + size, shape[0]))
