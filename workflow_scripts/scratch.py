"""Arrays that would take gigabytes of memory while a bundle is made: in files without a name, mapped.

The system can put their pages back to the disk at any time, and a killed process leaves nothing behind.
"""

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from workflow_scripts.blocks import row_blocks

_FILE_BYTES = 1 << 28  # of one file, which takes only as much of the disk as is written
_ALIGNMENT = 64


class Scratch:
    """Room on the disk of one folder. Few large files, since each mapping keeps its file open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file, self._mapped, self._used = None, np.empty(0, np.uint8), 0

    def array(self, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A mapped array of the elements of `blocks`, one after the other, which are of its type and fill it."""
        size = math.prod(shape) * dtype.itemsize
        space = self._space(size)
        for block in blocks:
            # Not through the mapping, where a full disk kills the process.
            self._file.write(np.ascontiguousarray(block).data)
        if self._file.tell() != self._used + size:
            raise ValueError(f"the blocks do not fill an array of {dtype} {list(shape)}")
        self._file.write(bytes(-size % _ALIGNMENT))
        self._file.flush()
        self._used = self._file.tell()
        return space.view(dtype).reshape(shape)

    def cast(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """A matrix with its elements in another type; as it is where they are of that type already."""
        if array.dtype == dtype:
            return array
        blocks = (array[rows].astype(dtype) for rows in row_blocks(array.shape))
        return self.array(blocks, array.shape, dtype)

    def _space(self, size: int) -> np.ndarray:
        """Where the next `size` bytes of the file are mapped."""
        if self._used + size > len(self._mapped):
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (as long as what is mapped)
            self._file.truncate(max(size, _FILE_BYTES))
            self._mapped, self._used = np.memmap(self._file, np.uint8, "r+"), 0
            self._file.seek(0)  # mapping it has gone to its end
        return self._mapped[self._used : self._used + size]
