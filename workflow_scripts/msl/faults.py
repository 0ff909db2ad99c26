"""What can be wrong with a kernel, as found by running it."""

import re

from workflow_scripts.errors import UserError


class KernelFault(UserError):
    """A kernel did something it must not do.

    `kind` is one of: `out of bounds`, `divergent barrier`, `data race`, `address`, `undefined behaviour`,
    `uninitialised` (a result's element was never written), `wrong-order` (the result depends on the order in which
    lanes, SIMD-groups or threadgroups run), `timeout`.
    """

    def __init__(self, kind: str, kernel: str, message: str) -> None:
        super().__init__(f"kernel {kernel}: {kind}: {message}")
        self.kind, self.kernel = kind, kernel

    @property
    def lines(self) -> list[int]:
        """The lines of the Metal source that the message names, as they are counted in the bundle."""
        return [int(line) for pair in _LINES.findall(str(self)) for line in pair if line]


_LINES = re.compile(r"\bline (\d+)(?: and (\d+))?")
_PLACE = re.compile(r"kernel\.metal:(\d+)")
# What a sanitizer's report says -> kind of the fault.
_REPORTS = (
    (r"WARNING: ThreadSanitizer: data race", "data race"),
    (r"runtime error: (index .*out of bounds.*|.*insufficient space.*)", "out of bounds"),
    (r"runtime error: (.*)", "undefined behaviour"),
    (r"ERROR: AddressSanitizer:? (.*?)(?: on address| at pc|$)", "address"),
)
_RACE = "two threads use the same memory without a barrier in between"


def fault_from(kernel: str, code: int, text: str) -> UserError:
    """The fault that a kernel's program reported on stderr before it ended with `code`."""
    own = re.search(r"^MSL-FAULT\t([^\t]*)\t(.*)$", text, re.MULTILINE)
    if own and own[1] == "argument":
        return UserError(f"kernel {kernel}: {own[2].partition(' (lane ')[0]}")
    if own:
        return KernelFault(own[1], kernel, own[2])
    if "unexpected memory mapping" in text:
        return UserError(
            "ThreadSanitizer of this compiler does not work with this system's address randomization: "
            "run `sudo sysctl vm.mmap_rnd_bits=28`, or take a newer compiler ($CXX)"
        )
    for pattern, kind in _REPORTS:
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            message = found[1] if found.groups() else _RACE
            return KernelFault(kind, kernel, message + _where(text, found.start()))
    said = text.strip().splitlines()[-1:] or ["it said nothing"]
    return UserError(f"kernel {kernel}: its program ended with code {code}: {said[0]}")


def _where(text: str, start: int) -> str:
    """Source lines and the lane that a sanitizer's report names."""
    line_start = text.rfind("\n", 0, start) + 1
    lines = list(dict.fromkeys(found[1] for found in _PLACE.finditer(text, line_start)))[:2]
    lane = re.search(r"^MSL-LANE\t ?(.*)$", text, re.MULTILINE)
    return (f", line {' and '.join(lines)} of the Metal source" if lines else "") + (
        f" {lane[1]}" if lane else ""
    )
