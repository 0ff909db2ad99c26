"""Threads of a stage that streams: how many there are, and work on them whose results come in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")

_VARIABLE = "OMP_NUM_THREADS"  # Snakemake sets it to a rule's `threads` for every shell command
_MOST = 32  # each holds some megabytes


def available_threads() -> int:
    """What the job may use: a rule's `threads` below Snakemake, else all cores. It is no part of a result's key."""
    told = os.environ.get(_VARIABLE, "").partition(",")[0]  # OpenMP allows a number for each nesting
    return min(int(told) if told.isdigit() and int(told) else os.cpu_count() or 1, _MOST)


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """`work` of every item in the order of the items, done on `threads` threads.

    Of results that are not taken yet only one more than there are threads is in memory. An error is raised where its
    result would come.
    """
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
