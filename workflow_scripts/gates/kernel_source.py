"""Is the Metal source in a bundle the text of our .metal file and nothing else?

The files are looked up here by name and are no part of the gate's own code, as seen by the key of its result: each is
embedded in the bundles that use it, so an edit makes other bundles, and those make the gate run again. An edit of one
kernel thereby leaves the verdicts over all other kernels' bundles as they are.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.msl.calls import KernelCall

_FOLDER = Path(__file__).parents[1] / "kernels"
# What conversion writes around a kernel's text (coreai.authoring.metal), the parameters left open.
_FRAME = re.compile(
    r"#include <metal_stdlib>\s+#include <MetalPerformancePrimitives/MetalPerformancePrimitives\.h>\s+"
    r"using namespace metal;\s+using namespace mpp::tensor_ops;\s+\[\[kernel\]\] void NAME\([^{}]*\) \{\s*\}"
)
_COUNTER = re.compile(r"_[a-z]{8}")  # what conversion appends to a kernel's name


def our_sources(folder: Path = _FOLDER) -> dict[str, str]:
    """Kernel -> text of its .metal file, for all kernels of a folder (this project's own)."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.metal"))}


def check_sources(
    verdict: Verdict, calls: Sequence[KernelCall], kernels: Sequence[str], sources: Mapping[str, str]
) -> None:
    """Call by call: the kernel's name, and its source. Equal sources are compared once."""
    wrong = [
        f"call {number} is {call.name}"
        for number, (call, kernel) in enumerate(zip(calls, kernels, strict=True))
        if not (call.name.startswith(kernel) and _COUNTER.fullmatch(call.name.removeprefix(kernel)))
    ]
    names = ", ".join(dict.fromkeys(kernels))
    verdict.check("kernels called", not wrong, names, wrong[0] if wrong else names)
    seen = {(call.source, call.name, kernel) for call, kernel in zip(calls, kernels, strict=True)}
    for source, name, kernel in sorted(seen):
        expected = f"the text of {kernel}.metal and nothing else"
        found = _what_is_wrong(source, name, kernel, sources)
        verdict.check(f"source of {name}", found is None, expected, found or expected)


def _what_is_wrong(source: str, name: str, kernel: str, sources: Mapping[str, str]) -> str | None:
    text = sources.get(kernel, "")
    if not text or source.count(text) != 1:
        others = [f"{other}.metal" for other, its in sources.items() if its in source and other != kernel]
        return f"the text of {', '.join(others)}" if others else "another text"
    rest = source.replace(text, "").replace(name, "NAME").strip()
    return None if _FRAME.fullmatch(rest) else "more than that text"


def text_line(call: KernelCall, text: str) -> int:
    """How many lines of the call's source lie before the first one of `text`."""
    return call.source[: call.source.index(text)].count("\n")
