"""Gate `structure`: is the bundle what it claims to be, apart from what it computes.

Whole files, the published interface, exactly the stored weights of its recipe in exactly their width, the predicted
size, names that are the same in every build, and no trace of the machine that built it.
"""

import hashlib
import json
import mmap
import re
from pathlib import Path

from workflow_scripts.coreai.bytecode import Constant, read_constants
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates import runs
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import FunctionSpec

_FILES = ["main.hash", "main.mlirb", "metadata.json"]
_SIZE_TOLERANCE = 0.02
# A constant that escaped content naming is called by a random number.
_RANDOM_NAME = re.compile(rb"resource_[0-9]{8,}")
_MACHINE_PATH = re.compile(rb"/(?:home|root|tmp|Users|private|var|opt|work|mnt)/[\w.-]+|site-packages")


def content_name(data: bytes | memoryview) -> str:
    """The name under which a large constant with these bytes stands in a reproducible bundle."""
    return "w_" + hashlib.sha256(data).hexdigest()[:32]


def gate_structure(
    verdict: Verdict, bundle: Path, signature: dict[str, FunctionSpec], weights: dict[str, tuple[str, int]]
) -> None:
    """All structural checks; `weights` maps the content name of every weight to its tensor's name and bytes."""
    program = bundle / "main.mlirb"
    found = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*"))
    verdict.check("files", found == _FILES, ", ".join(_FILES), ", ".join(found))
    _check_metadata(verdict, json.loads((bundle / "metadata.json").read_text(encoding="utf-8")))
    with program.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        whole = (bundle / "main.hash").read_bytes() == hashlib.sha256(data).digest()
        verdict.check("main.hash", whole, "sha256 of main.mlirb", "equal" if whole else "another")
        constants = read_constants(program)
        _check_constants(verdict, data, constants, weights)
        _check_traces(verdict, data, constants)
    _check_signature(verdict, bundle, signature)


def _check_metadata(verdict: Verdict, metadata: dict[str, object]) -> None:
    producer = str(metadata.get("producer", "none"))
    verdict.check("producer", producer.startswith("coreai-core "), "coreai-core VERSION", producer)
    created = str(metadata.get("creationDate", "none"))
    verdict.check("creation date", created == "20260101T000000Z", "the fixed date", created)


def _check_constants(
    verdict: Verdict, data: mmap.mmap, constants: list[Constant], weights: dict[str, tuple[str, int]]
) -> None:
    """Every weight is there, in its width, under the name of its content; nothing large is there beside them."""
    view = memoryview(data)
    wrong = [c.name for c in constants if content_name(view[c.offset : c.offset + c.size]) != c.name]
    view.release()
    verdict.check("constants are named by content", not wrong, "all", wrong[0] if wrong else "all")
    stored = {constant.name: constant.size for constant in constants}
    missing = [tensor for name, (tensor, _) in weights.items() if name not in stored]
    found = "all" if not missing else f"{len(missing)} missing, first {missing[0]}"
    verdict.check(f"{len(weights)} weights stored as the recipe says", not missing, "all", found)
    predicted = sum(size for _, size in weights.values())
    excess = abs(sum(stored.values()) / predicted - 1) if predicted else float(bool(stored))
    verdict.at_most("bytes of constants against prediction", excess, _SIZE_TOLERANCE)


def _check_traces(verdict: Verdict, data: mmap.mmap, constants: list[Constant]) -> None:
    """Search all that is no constant: program, names, debug information."""
    start, text = 0, []
    for constant in sorted(constants, key=lambda c: c.offset):
        text.append(data[start : constant.offset])
        start = constant.offset + constant.size
    rest = b"\n".join([*text, data[start:]])
    for name, pattern in (
        ("no random names", _RANDOM_NAME),
        ("no path of the building machine", _MACHINE_PATH),
    ):
        hit = pattern.search(rest)
        verdict.check(
            name, hit is None, "none", "none" if hit is None else hit.group().decode(errors="replace")
        )


def _check_signature(verdict: Verdict, bundle: Path, signature: dict[str, FunctionSpec]) -> None:
    expected = {
        f"{function}/{side}/{index}/{name}/{tensor.dtype}": tensor.shape
        for function, spec in signature.items()
        for side, tensors in (("input", spec.inputs), ("output", spec.outputs))
        for index, (name, tensor) in enumerate(tensors.items())
    }
    described = isolated(runs.describe, bundle=str(bundle))
    found = {key: tuple(shape.tolist()) for key, shape in described.items()}
    for key in sorted(expected.keys() | found.keys()):
        want, have = expected.get(key), found.get(key)
        if want != have:
            verdict.check(f"interface {key}", False, str(want or "not there"), str(have or "not there"))
            return
    verdict.check("interface", True, f"{len(expected)} tensors", f"{len(found)} tensors")
