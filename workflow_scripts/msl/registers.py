"""Which of a kernel's own arrays and vectors stay in registers, as far as its text tells.

A GPU cannot address its registers: an array whose index the compiler does not know lies in memory instead.
"""

import re
from dataclasses import dataclass

from workflow_scripts.msl.signature import buffer_names, without_comments

# `[[` opens an attribute. A subscript of a subscript, or of a call's result, has no name: it is taken for a local one.
_SUBSCRIPT = re.compile(r"(?:\b(?P<name>[A-Za-z_]\w*)|[\])])\s*\[(?!\[)")
_STORAGE = re.compile(r"\bthreadgroup\b(?P<declared>[^;(){}*&]*);")
_LOCAL_ARRAY = re.compile(r"\b(?!return\b)[A-Za-z_]\w*\s+(?P<name>[A-Za-z_]\w*)\s*\[\s*\d+\s*\]\s*[=;,{]")
_LITERAL = re.compile(r"\d+[uU]?")
_UNROLLED = re.compile(
    r"#pragma unroll[ \t]*\n\s*for\s*\(\s*\w+ (?P<name>\w+)\s*=\s*\d+[uU]?\s*;"
    r"\s*(?P=name)\s*<=?\s*\d+[uU]?\s*;\s*(?:\+\+(?P=name)|(?P=name)\+\+)\s*\)\s*"
)


@dataclass(frozen=True)
class _Loop:
    """Text range of an unrolled loop's body, in which its variable is a constant of each copy."""

    variable: str
    start: int
    end: int


def moving_indices(source: str, kernel: str) -> list[str]:
    """Uses of local arrays and vectors that `kernel` may not keep in registers, as written, in order.

    Local is what is neither one of the kernel's buffers nor declared as `threadgroup`. An index is good if it is a
    literal, or the variable of a loop with literal bounds directly under `#pragma unroll`; a name without an index is
    none, since an array becomes a pointer then. Strict: what the text leaves open is listed. Raises UserError where
    the kernel's parameters cannot be read.
    """
    text = without_comments(source)
    memory = {*buffer_names(source, kernel), *_threadgroup_arrays(text)}
    loops = [_loop(text, found) for found in _UNROLLED.finditer(text)]
    uses = [(found.start(), _whole(text, found)) for found in _SUBSCRIPT.finditer(text)]
    moving = [
        (place, use)
        for place, use in uses
        if use.partition("[")[0].strip() not in memory and not _is_constant(use, place, loops, text)
    ]
    return [use for _, use in sorted(moving + _decayed(text, memory))]


def _threadgroup_arrays(text: str) -> list[str]:
    return [
        name
        for found in _STORAGE.finditer(text)
        for name in re.findall(r"([A-Za-z_]\w*)\s*\[", found["declared"])
    ]


def _whole(text: str, found: re.Match[str]) -> str:
    """A subscript from its name to its own closing bracket."""
    return text[found.start() : _closing(text, found.end() - 1, "[]") + 1]


def _closing(text: str, opening: int, pair: str) -> int:
    """The place of the bracket that closes the one at `opening`, or the text's end."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if depth == 0:
            return place
    return len(text)


def _loop(text: str, found: re.Match[str]) -> _Loop:
    start = found.end()
    if text[start : start + 1] == "{":
        return _Loop(found["name"], start, _closing(text, start, "{}"))
    end = text.find(";", start)
    return _Loop(found["name"], start, len(text) if end < 0 else end)


def _is_constant(use: str, place: int, loops: list[_Loop], text: str) -> bool:
    index = use[use.find("[", 1) + 1 : -1].strip()
    if _LITERAL.fullmatch(index):
        return True
    return any(
        loop.variable == index and loop.start <= place < loop.end and not _is_changed(text, loop)
        for loop in loops
    )


def _is_changed(text: str, loop: _Loop) -> bool:
    """Is there an assignment to the loop's variable, a declaration of its name, or its address, in the body?"""
    name = re.escape(loop.variable)
    assigned = rf"\b{name}\s*(?:[-+*/%|^&]|<<|>>)?=(?!=)"
    stepped = rf"\b{name}\s*(?:\+\+|--)|(?:\+\+|--)\s*{name}\b"
    address = rf"[(,=]\s*&\s*{name}\b"
    return re.search(f"{assigned}|{stepped}|{address}", text[loop.start : loop.end]) is not None


def _decayed(text: str, memory: set[str]) -> list[tuple[int, str]]:
    """(place, name) where a local array is used without an index."""
    arrays = {found["name"] for found in _LOCAL_ARRAY.finditer(text)} - memory
    return [
        (found.start(), name)
        for name in arrays
        for found in re.finditer(rf"(?<![\w.]){name}\b(?!\s*\[)", text)
    ]
