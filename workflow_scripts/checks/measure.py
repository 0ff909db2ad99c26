"""What the parts of `make bench` share: time in turns, a copy to compare with, what is missed, and silence."""

import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


def least_seconds(*runs: Callable[[], object], rounds: int) -> list[float]:
    """The least time of each, run in turns, in seconds of the processor.

    What else the host does then weighs on all alike, and little.
    """
    least = [float("inf")] * len(runs)
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.process_time()
            run()
            least[i] = min(least[i], time.process_time() - start)
    return least


def copy_bytes(source: Path, target: Path, size: int, chunk: int = 1 << 20) -> None:
    """Read all of a file, and write `size` bytes of it, evenly."""
    share, buffer = size / source.stat().st_size, memoryview(bytearray(chunk))
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as write:
        while count := read.readinto(buffer):
            write.write(buffer[: round(count * share)])


def all_reached(misses: Sequence[str]) -> bool:
    """Whether nothing that is demanded is missed; prints what is."""
    for miss in misses:
        print(f"missed: {miss}")
    return not misses


def memory_columns(memory: int | None, size: int) -> str:
    """Two columns of a table, of 15 characters each: MiB of anonymous memory, and its share of `size` bytes."""
    return f"{'not known':>15}" if memory is None else f"{memory / 2**20:>15.0f}{memory / size:>15.2f}"


@contextmanager
def quiet() -> Iterator[None]:
    """Libraries write to both streams, draw progress bars and warn of each other: nothing of it belongs in a table."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
