"""Cyclic garbage collection, put off while nothing becomes garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no cyclic garbage inside this block, which makes many objects that outlive it.

    The collector walks all of them again and again: a fifth of the time of importing torch, a tenth of an export's
    (measured).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
