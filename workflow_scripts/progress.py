"""Progress of long work: every step goes to the log, lines with total and estimate to the terminal.

Quick work prints nothing there. An estimate is given only where something was counted; a long call of a library that
counts nothing says how long it is at it.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")

TERMINAL = logging.getLogger("terminal")  # the stage runner sends this logger's lines to the terminal as well
_LOG = logging.getLogger(__name__)
_QUIET_SECONDS = 3.0  # quick work prints nothing on the terminal
_LEAST_TOLD = 1.0  # seconds of a phase that are worth telling when its like comes
_TICK_SECONDS = 10.0  # between two signs of life of one step


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yield `items`, logging `label k/total item` and now and then a terminal line with the time left.

    A step that takes long says so meanwhile.
    """
    start = shown = begun = time.monotonic()
    count = 0

    def at_it() -> str:
        left = f", about {_left(start, begun, count - 1, total)} s left" if count > 1 else ""
        return f"{label} {count}/{total}, {time.monotonic() - begun:.0f} s at this one{left}"

    with _ticking(at_it, since=lambda: begun):
        for count, item in enumerate(items, start=1):
            _LOG.info("%s %d/%d %s", label, count, total, item if isinstance(item, str | int) else "")
            yield item
            begun = time.monotonic()
            if begun - shown >= _QUIET_SECONDS:
                shown = begun
                TERMINAL.info(
                    "%s %d/%d, about %d s left", label, count, total, _left(start, begun, count, total)
                )


@contextmanager
def working(label: str, out: Path | None = None, total: int = 0) -> Iterator[None]:
    """Say of a block that takes long how long it is at it already, and then how long it took.

    `out` is a folder that it fills meanwhile, `total` how many bytes that will be, where it is known.
    """
    start = time.monotonic()
    _LOG.info("%s", label)

    def at_it() -> str:
        now = time.monotonic()
        done = _size(out) if out else 0
        size = f", {done / 1e9:.1f} GB written" if done else ""
        if done and total:
            size = f", {done / 1e9:.1f} of {total / 1e9:.1f} GB written"
        return f"{label}: {now - start:.0f} s so far{size}"

    with _ticking(at_it, since=lambda: start):
        yield
    seconds = time.monotonic() - start
    if seconds >= _QUIET_SECONDS:
        TERMINAL.info("%s: %.0f s", label, seconds)


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, as far as they are written."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0


class Phases:
    """Long calls one after the other, of which only the number is known: `phase k/n LABEL`.

    Of a kind that was there before it is said what that one took.
    """

    def __init__(self, total: int) -> None:
        self._total, self._number = total, 0
        self._took: dict[str, float] = {}

    @contextmanager
    def next(self, kind: str, what: str, out: Path | None = None) -> Iterator[None]:
        """The block is the next phase; `out` is a folder that it fills."""
        self._number += 1
        before = f" (the last took {self._took[kind]:.0f} s)" if self._took.get(kind, 0) > _LEAST_TOLD else ""
        start = time.monotonic()
        with working(f"phase {self._number}/{self._total} {kind} {what}{before}", out):
            yield
        self._took[kind] = time.monotonic() - start


class Meter:
    """Progress over a number of bytes that is known before: `label 1.2 of 3.4 GB, about 5 s left`."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._start = self._shown = time.monotonic()

    def add(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        now = time.monotonic()
        if now - self._shown >= _QUIET_SECONDS:
            self._shown = now
            left = _left(self._start, now, self._done, self._total)
            done, total = self._done / 1e9, self._total / 1e9
            TERMINAL.info("%s %.1f of %.1f GB, about %d s left", self._label, done, total, left)


def _left(start: float, now: float, done: int, total: int) -> int:
    """Seconds that the rest takes if it goes on as it went from `start` to `now`."""
    return round((now - start) / max(done, 1) * max(total - done, 0))


@contextmanager
def _ticking(line: Callable[[], str], since: Callable[[], float]) -> Iterator[None]:
    """A terminal line every ten seconds of the block that nothing else has happened `since`."""
    ended = threading.Event()

    def run() -> None:
        wait = _TICK_SECONDS
        while not ended.wait(wait):
            quiet = time.monotonic() - since()
            if quiet >= _TICK_SECONDS:
                TERMINAL.info("%s", line())
            wait = _TICK_SECONDS - quiet if 0 < quiet < _TICK_SECONDS else _TICK_SECONDS

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
