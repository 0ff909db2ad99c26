"""Read the container of a `main.mlirb`: which constants it holds, by name, with offset and size.

The file is MLIR bytecode, version 6 (https://mlir.llvm.org/docs/BytecodeFormat/). Only its string and resource
sections are read, so a file of gigabytes costs milliseconds and no constant is loaded.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path

from workflow_scripts.errors import UserError

_MAGIC = b"ML\xefR"
_STRINGS, _RESOURCES, _RESOURCE_OFFSETS = 0, 5, 6
_ALIGNED = 0x80
_BLOB = 0


@dataclass(frozen=True)
class Constant:
    """A large constant: its resource name, and where its bytes lie in the file."""

    name: str
    offset: int
    size: int


class _Cursor:
    """A position in the mapped file."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def varint(self) -> int:
        """The number of trailing zero bits of the first byte tells how many bytes follow it."""
        first = self.data[self.position]
        if first == 0:
            self.position += 9
            return int.from_bytes(self.data[self.position - 8 : self.position], "little")
        length = (first & -first).bit_length()
        self.position += length
        return int.from_bytes(self.data[self.position - length : self.position], "little") >> length

    def align(self, alignment: int) -> None:
        self.position += -self.position % alignment


def read_constants(path: Path) -> list[Constant]:
    """Every constant that is stored as a named resource, in file order.

    Raises UserError where the file is no bytecode or ends early.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            sections = _sections(data)
            names = _strings(_Cursor(data, sections[_STRINGS].start))
            if _RESOURCE_OFFSETS not in sections:
                return []
            offsets = sections[_RESOURCE_OFFSETS]
            keys = _resource_keys(_Cursor(data, offsets.start), offsets.stop, names)
            constants = _blobs(_Cursor(data, sections[_RESOURCES].start), keys)
            if constants and constants[-1].offset + constants[-1].size > len(data):
                raise IndexError("a constant reaches past the end of the file")
            return constants
        except (IndexError, KeyError, UnicodeDecodeError) as problem:
            raise UserError(f"{path} is damaged: it is no whole MLIR bytecode file ({problem})") from None


def _sections(data: mmap.mmap) -> dict[int, range]:
    """Section id -> where its content lies."""
    if data[:4] != _MAGIC:
        raise IndexError("wrong magic number")
    cursor = _Cursor(data, 4)
    cursor.varint()  # version
    producer_end = data.find(b"\0", cursor.position)
    if producer_end < 0:
        raise IndexError("no producer string")
    cursor.position = producer_end + 1
    found: dict[int, range] = {}
    while cursor.position < len(data):
        kind = cursor.byte()
        length = cursor.varint()
        if kind & _ALIGNED:
            cursor.align(cursor.varint())
        found[kind & ~_ALIGNED] = range(cursor.position, cursor.position + length)
        cursor.position += length
    if cursor.position != len(data):
        raise IndexError(f"it ends {cursor.position - len(data)} bytes early")
    return found


def _strings(cursor: _Cursor) -> list[str]:
    count = cursor.varint()
    sizes = [cursor.varint() for _ in range(count)][::-1]  # stored from the last string to the first
    strings = []
    for size in sizes:
        strings.append(cursor.data[cursor.position : cursor.position + size - 1].decode())
        cursor.position += size
    return strings


def _resource_keys(cursor: _Cursor, end: int, names: list[str]) -> list[tuple[str, int, int]]:
    """(name, size of the entry, kind) of every resource."""
    keys = []
    cursor.varint()  # how many of the groups are external; the dialects' groups follow, uncounted
    while cursor.position < end:
        cursor.varint()  # the group's own name
        for _ in range(cursor.varint()):
            keys.append((names[cursor.varint()], cursor.varint(), cursor.byte()))
    return keys


def _blobs(cursor: _Cursor, keys: list[tuple[str, int, int]]) -> list[Constant]:
    constants = []
    for name, entry_size, kind in keys:
        end = cursor.position + entry_size
        if kind == _BLOB:
            alignment, size = cursor.varint(), cursor.varint()
            cursor.align(alignment)
            constants.append(Constant(name, cursor.position, size))
        cursor.position = end
    return constants
