"""How the checks of the configuration speak: the key, what was found, what is allowed, what was probably meant."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any


def twice(names: dict[str, str]) -> Iterator[str]:
    """Names (by key) that meet in one place; letter case does not tell files apart on a Mac."""
    first: dict[str, str] = {}
    for where, name in names.items():
        other = first.setdefault(name.casefold(), where)
        if other != where:
            yield f"{where}: {show(name)} is taken by {other}"


def join(path: str, key: str) -> str:
    """The path of a key below another one; `path` is empty at the top."""
    return f"{path}.{key}" if path else key


def show(value: Any) -> str:
    """A found value, cut to a line's length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def allowed(found: Any, names: Iterable[object], label: str = "allowed") -> str:
    """`allowed: a, b, c`, with the name that was probably meant."""
    names = [str(name) for name in names]
    nearest = difflib.get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f". Did you mean {nearest[0]}?" if nearest else ""
    return f"{label}: {', '.join(names)}{hint}"
