"""What a kernel's source text says about its parameters and about its threadgroup storage.

Both are read from the text, since the source itself is compiled unchanged.
"""

import re
from dataclasses import dataclass

from workflow_scripts.errors import UserError

BUFFER = "buffer"
ATTRIBUTES = frozenset(
    {
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
        "threadgroups_per_grid",
        "dispatch_threads_per_threadgroup",
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
    }
)
_HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_PARAMETER = re.compile(
    r"(?P<type>.*?)\b(?P<name>\w+)\s*\[\[\s*(?P<attribute>\w+)\s*(?:\(\s*\d+\s*\))?\s*\]\]\s*", re.DOTALL
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel; `kind` is "buffer" or the name of the attribute input."""

    name: str
    kind: str


def parse_signature(source: str, kernel: str) -> list[Parameter]:
    """The parameters of `kernel`, in order. Raises UserError where the kernel or an attribute cannot be understood."""
    text = without_comments(source)
    start = re.search(rf"\bvoid\s+{re.escape(kernel)}\s*\(", text)
    if not start:
        raise UserError(f"the Metal source has no `void {kernel}(...)`")
    return [_parameter(part, kernel) for part in _split(text, start.end(), kernel)]


def buffer_names(source: str, kernel: str) -> list[str]:
    """Names of the kernel's buffers: its arguments, then its results."""
    return [parameter.name for parameter in parse_signature(source, kernel) if parameter.kind == BUFFER]


def storage_declarations(source: str) -> list[bool]:
    """For every `threadgroup` that the preprocessor will see, in order: does it declare storage (or qualify a pointer)?

    Raises UserError where the two cannot be told apart.
    """
    text = without_comments(source)
    return [_is_storage(text, found) for found in re.finditer(r"\bthreadgroup\b", text)]


def without_comments(source: str) -> str:
    """The source with comments and strings blanked, every other character at its place."""
    return _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), source)


def _split(text: str, start: int, kernel: str) -> list[str]:
    """The parameters' texts, from behind the opening parenthesis to the closing one."""
    parts, depth, begin = [], 0, start
    for position in range(start, len(text)):
        letter = text[position]
        if letter == ")" and depth == 0:
            parts.append(text[begin:position])
            return [part for part in parts if part.strip()]
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    raise UserError(f"the Metal source ends within the parameters of `{kernel}`")


def _parameter(text: str, kernel: str) -> Parameter:
    found = _PARAMETER.fullmatch(text.strip())
    if not found:
        raise UserError(
            f"kernel {kernel}: parameter `{text.strip()}` has no [[attribute]] that could be read"
        )
    if found["attribute"] != BUFFER and found["attribute"] not in ATTRIBUTES:
        raise UserError(
            f"kernel {kernel}: attribute [[{found['attribute']}]] of {found['name']} is not available on the CPU"
        )
    return Parameter(found["name"], found["attribute"])


def _is_storage(text: str, found: re.Match[str]) -> bool:
    line_start = text.rfind("\n", 0, found.start()) + 1
    if text[line_start : found.start()].lstrip().startswith("#"):
        raise UserError(
            f"line {_line(text, found)} of the Metal source uses `threadgroup` in a macro: write it where it is meant"
        )
    declarator = re.split(r"[;=,()\[>]", text[found.end() :], maxsplit=1)[0]
    if "*" in declarator or "&" in declarator:
        return False
    before = text[: found.start()].rstrip()[-1:]
    if before not in ("", ";", "{", "}"):
        raise UserError(
            f"line {_line(text, found)} of the Metal source: `threadgroup` is neither at the begin of a declaration "
            "nor part of a pointer's type"
        )
    return True


def _line(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1
