"""The safetensors file format: a reader that maps tensors, and a writer that streams them.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, and the
tensors' bytes, without gaps, in C order. `data_offsets` count from the header's end.
Format: huggingface/safetensors, README.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

from workflow_scripts.errors import UserError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100_000_000  # the reference implementation's own limit
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `offset` and `size` are bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of a file, in the order of their bytes.

    Raises UserError naming the file (and tensor) where it is missing, no safetensors file, contradictory, or shorter or
    longer than its header says.
    """
    if not path.is_file():
        state = "is a symlink to a file that is not there" if path.is_symlink() else "is missing"
        raise UserError(f"{path} {state}; fetch the checkpoint again")
    file_size = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER, file_size - 8):
            raise UserError(
                f"{path} is not a whole safetensors file: {file_size} bytes cannot hold its header; fetch it again"
            )
        header = _parse(stream.read(length), path)
    header.pop(_METADATA, None)
    start = 8 + length
    infos = {name: _tensor_info(name, entry, path, start) for name, entry in header.items()}
    ordered = dict(sorted(infos.items(), key=lambda item: (item[1].offset, item[1].size, item[0])))
    _check_layout(ordered, path, start, file_size)
    return ordered


def map_tensor(info: TensorInfo) -> np.ndarray:
    """The tensor as an array over the mapped file: nothing is read before it is used.

    The mapping is copy-on-write, so that libraries which insist on writable memory take it; the file never changes.
    """
    dtype = DTYPES[info.dtype]
    if info.size == 0:  # an empty range cannot be mapped
        return np.empty(info.shape, dtype)
    return np.asarray(np.memmap(info.path, dtype=dtype, mode="c", offset=info.offset, shape=info.shape))


class SafetensorsWriter:
    """Writes one file tensor by tensor, in the declared order, never holding more than the rows that it is given.

    with SafetensorsWriter(path, {"a": ("F16", (4, 32))}) as writer:
        writer.write("a", array)      # or writer.append("a", rows) several times

    A wrong name, dtype, shape or amount is a mistake of the calling code and raises ValueError; so does leaving the
    block before every declared tensor is whole.
    """

    def __init__(
        self,
        path: Path,
        tensors: dict[str, tuple[str, tuple[int, ...]]],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._path = path
        self._tensors = tensors
        self._header = _build_header(tensors, metadata)
        self._left = list(tensors)  # names not yet whole, in order
        self._rows = 0  # rows of the first of them that are written

    def __enter__(self) -> Self:
        self._stream = self._path.open("wb")
        self._stream.write(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        if kind is None and self._left:
            raise ValueError(f"{self._path.name}: not written whole: {', '.join(self._left[:10])}")

    def write(self, name: str, array: np.ndarray) -> None:
        """Write a whole tensor."""
        _, shape = self._next(name)
        if self._rows or array.shape != shape:
            raise ValueError(f"{name}: {array.shape} given after {self._rows} rows, {shape} declared")
        self._put(name, array)
        self._finish()

    def append(self, name: str, rows: np.ndarray) -> None:
        """Write the next rows, an array of shape (n, *shape[1:]), of a tensor."""
        _, shape = self._next(name)
        if not shape or rows.shape[1:] != shape[1:] or self._rows + len(rows) > shape[0]:
            raise ValueError(f"{name}: rows {rows.shape} after {self._rows} rows do not fit {shape}")
        self._put(name, rows)
        self._rows += len(rows)
        if self._rows == shape[0]:
            self._finish()

    def _next(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Declared dtype and shape of a tensor, which must be the next one."""
        if self._left[:1] != [name]:
            raise ValueError(
                f"{name} given, but next in the declared order is {(self._left or ['nothing'])[0]}"
            )
        return self._tensors[name]

    def _put(self, name: str, array: np.ndarray) -> None:
        dtype = self._tensors[name][0]
        if array.dtype != DTYPES[dtype]:
            raise ValueError(f"{name}: {array.dtype} given, {dtype} declared")
        self._stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _finish(self) -> None:
        self._left.pop(0)
        self._rows = 0


def _build_header(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None) -> bytes:
    """Length and JSON header, padded with spaces so that the data starts at a multiple of 8 bytes."""
    header: dict[str, Any] = {} if metadata is None else {_METADATA: metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise UserError(f"{path} is not a safetensors file: its header is not readable JSON; fetch it again")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("duplicate name")
    return dict(pairs)


def _tensor_info(name: str, entry: Any, path: Path, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        readable = all(type(number) is int and number >= 0 for number in numbers) and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        readable = False
    if not readable:
        raise UserError(f"{path}: the header entry of tensor {name} is not readable; fetch the file again")
    if dtype not in DTYPES:
        raise UserError(f"{path}: tensor {name} has the unknown dtype {dtype}")
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise UserError(
            f"{path}: tensor {name} is declared as {dtype} {list(shape)} but has {end - begin} bytes; "
            "fetch the file again"
        )
    return TensorInfo(dtype, shape, path, start + begin, end - begin)


def _check_layout(infos: dict[str, TensorInfo], path: Path, start: int, file_size: int) -> None:
    """The tensors must fill the file exactly, without gap or overlap."""
    position = start
    for name, info in infos.items():
        if info.offset != position:
            raise UserError(
                f"{path}: tensor {name} overlaps another one or leaves a gap; fetch the file again"
            )
        position += info.size
    if position != file_size:
        state = "truncated" if file_size < position else "too long"
        raise UserError(
            f"{path} is {state}: its header declares {position} bytes, the file has {file_size}; fetch it again"
        )
