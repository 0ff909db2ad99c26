"""Progress of long work: every step goes to the log, a line with total and estimate to the terminal."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

TERMINAL = logging.getLogger("terminal")  # the stage runner sends this logger's lines to the terminal as well
_LOG = logging.getLogger(__name__)
_QUIET_SECONDS = 3.0  # quick work prints nothing on the terminal


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Yield `items`, logging `label k/total item` and now and then a terminal line with the time left."""
    start = shown = time.monotonic()
    for count, item in enumerate(items, start=1):
        _LOG.info("%s %d/%d %s", label, count, total, item if isinstance(item, str | int) else "")
        yield item
        now = time.monotonic()
        if now - shown >= _QUIET_SECONDS:
            shown, left = now, (now - start) / count * (total - count)
            TERMINAL.info("%s %d/%d, about %d s left", label, count, total, left)
