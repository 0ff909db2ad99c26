"""A small bundle with its block codes multiplied by their steps once, and not in every call.

The Linux runtime does it again for each token, which takes half of its time (measured: 155 ms of a call of the embedded
model's decoder against 77 ms). The values are the same to the bit: a code has few digits, so its product with a step is
rounded once in either way. Gate `numbers` runs every bundle as it ships; what feeds hundreds of tokens may run this.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from coreai.authoring import AIModelAsset

from workflow_scripts.coreai import private
from workflow_scripts.coreai.host_copy import axes, constants_of, element, saved_copy, stored_bytes
from workflow_scripts.kernels.packing import unpack

_SMALL = 1 << 26  # bytes of a program; E2B's would grow to 10 GB
_CODE_BITS = {"si4": 4, "si8": 8}
_STEPS = {"f16": np.float16, "f32": np.float32}


@contextmanager
def expanded(bundle: Path) -> Iterator[Path]:
    """A folder to load in place of `bundle`, for the time of the block; the bundle itself where it is large.

    And on a Mac, which runs what ships. Raises UserError where there is no room for the copy.
    """
    path = bundle / "main.mlirb"
    if sys.platform == "darwin" or not path.is_file() or path.stat().st_size > _SMALL:
        yield bundle
        return
    program, stored, sizes = AIModelAsset.load(bundle).program, constants_of(path), []

    def values(codes: private.KernelValue, steps: private.KernelValue) -> np.ndarray | None:
        """Codes [N, K] times steps [N, K / block], in the steps' type; None for anything else."""
        shape, blocks = axes(codes), axes(steps)
        bits, dtype = _CODE_BITS.get(element(codes)), _STEPS.get(element(steps))
        if not (codes.resource and bits and dtype) or len(shape) != 2 or len(blocks) != 2:
            return None
        words = stored_bytes(path, stored, codes).reshape(shape[0], -1)
        factors = stored_bytes(path, stored, steps).view(dtype).reshape(blocks)
        product = _signed(words, bits).astype(dtype) * factors.repeat(shape[1] // blocks[1], axis=1)
        sizes.append(product.nbytes)
        return product

    private.replace_block_codes(program, values)
    with saved_copy(
        program, bundle, sum(sizes), "runs as a temporary copy with its codes expanded"
    ) as folder:
        yield folder


def _signed(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes [N, K] in two's complement from their packed bytes [N, K * bits / 8]."""
    codes, half = unpack(np.ascontiguousarray(packed).view(np.int32), bits), 1 << (bits - 1)
    return (codes ^ half).astype(np.int16) - half
