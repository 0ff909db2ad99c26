"""A call of a Metal kernel in a bundle, as data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Argument:
    """One input of a kernel; axes in torch's order. `constant` is None for a value that the graph computes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    constant: np.ndarray | None


@dataclass(frozen=True)
class Result:
    """One output of a kernel; axes in torch's order."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class KernelCall:
    """One call of a kernel in a bundle: its source as shipped, its inputs and outputs, its dispatch in threads."""

    function: str
    name: str
    source: str
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def distinct(calls: Sequence[KernelCall]) -> list[list[KernelCall]]:
    """Calls grouped by what they execute: source but for the kernel's counted name, shapes, dtypes and dispatch."""
    groups: dict[tuple, list[KernelCall]] = {}
    for call in calls:
        shapes = tuple((value.dtype.str, value.shape) for value in (*call.arguments, *call.results))
        key = (call.source.replace(call.name, "KERNEL"), shapes, call.grid, call.threadgroup)
        groups.setdefault(key, []).append(call)
    return list(groups.values())
