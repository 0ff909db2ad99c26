"""Gate `structure`: is the bundle what it claims to be, apart from what it computes.

Whole files, the published interface, exactly the stored weights of its recipe in exactly their width, the predicted
size, names that are the same in every build, and no trace of the machine that built it.

Two sizes are predicted: that of all constants from the weights at hand, and the bits per weight of each kind of matrix
from the recipe alone. The second finds what a tool left out that skips a tensor, say a head that shares its parameter.
"""

import hashlib
import json
import mmap
import os
import re
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from workflow_scripts.coreai.bytecode import Constant, read_constants
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_file
from workflow_scripts.gates import runs
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import ANY_LENGTH, FunctionSpec
from workflow_scripts.progress import track

_ROOT = Path(__file__).parents[2]
_METADATA = "metadata.json"
_FILES = ["main.hash", "main.mlirb", _METADATA]
# Both predictions are exact: measured 0 for every bundle. What may differ are small constants that are no weights, such
# as the rotary frequencies (1 KB). A tool that leaves one matrix in float16 adds more: E2B's smallest is 0.15% of the
# matrices of its kind, and adds as much beside 8 bits, 0.4% beside 4.
_SIZE_TOLERANCE = 0.001
# A constant that escaped content naming is called by a random number.
_RANDOM_NAME = re.compile(rb"resource_[0-9]{8,}")
_MACHINE_PATH = re.compile(rb"/(?:home|root|tmp|Users|private|var|opt|work|mnt)/[\w.-]+|site-packages")


def content_name(data: bytes | memoryview) -> str:
    """The name under which a large constant with these bytes stands in a reproducible bundle."""
    return named(hashlib.sha256(data).hexdigest())


def named(sha256: str) -> str:
    """A content name from the content's hex sha256."""
    return "w_" + sha256[:32]


@dataclass(frozen=True)
class Width:
    """The matrices of a kind: bits per weight by the recipe, number of weights, and the constants that hold them.

    `constants` has the content name of every stored part; `text_bytes` are those of parts in the program's text.
    """

    bits: float
    weights: int
    constants: Sequence[str]
    text_bytes: int = 0


@dataclass(frozen=True)
class Claim:
    """What a bundle is said to be.

    `description` is what it says of itself; `weights` maps the content name of every weight to its tensor's name and
    bytes, `widths` each kind of matrix to its width; `known` holds the content names of constants that may be there
    beside them; `static` names the functions in which no dimension may change from call to call.
    """

    signature: dict[str, FunctionSpec]
    description: dict[str, str]
    weights: Mapping[str, tuple[str, int]]
    widths: Mapping[str, Width] = field(default_factory=dict)
    known: Set[str] = frozenset()
    static: Set[str] = frozenset()


def gate_structure(verdict: Verdict, bundle: Path, claim: Claim) -> None:
    """All structural checks."""
    program = bundle / "main.mlirb"
    found = sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*"))
    verdict.check("files", found == _FILES, ", ".join(_FILES), ", ".join(found))
    _check_metadata(verdict, bundle / _METADATA, claim.description)
    with program.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        whole = (bundle / "main.hash").read_bytes() == bytes.fromhex(sha256_file(program))
        verdict.check("main.hash", whole, "sha256 of main.mlirb", "equal" if whole else "another")
        constants = read_constants(program)
        _check_constants(verdict, data, constants, claim)
        check_traces(verdict, "main.mlirb", text_of(data, constants))
    check_traces(verdict, _METADATA, (bundle / _METADATA).read_bytes())
    _check_interface(verdict, bundle, claim)


def _check_metadata(verdict: Verdict, path: Path, description: dict[str, str]) -> None:
    metadata = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(metadata, dict):
        raise UserError(f"{path} holds no JSON object")
    producer = str(metadata.get("producer", "none"))
    verdict.check("producer", producer.startswith("coreai-core "), "coreai-core VERSION", producer)
    created = str(metadata.get("creationDate", "none"))
    verdict.check("creation date", created == "20260101T000000Z", "the fixed date", created)
    said = metadata.get("creatorDefinedMetadata")
    said = said if isinstance(said, dict) else {}
    for key in sorted(description.keys() | said.keys()):
        want, have = str(description.get(key, "not there")), str(said.get(key, "not there"))
        verdict.check(f"says its {key}", want == have, want[:16], have[:16])


def _check_constants(verdict: Verdict, data: mmap.mmap, constants: list[Constant], claim: Claim) -> None:
    """Every weight is there, in its width, under the name of its content; nothing unknown is there beside them."""
    view = memoryview(data)
    wrong = [
        c.name
        for c in track(constants, "hash constants", len(constants))
        if content_name(view[c.offset : c.offset + c.size]) != c.name
    ]
    view.release()
    verdict.check("constants are named by content", not wrong, "all", wrong[0] if wrong else "all")
    stored = {constant.name: constant.size for constant in constants}
    missing = [tensor for name, (tensor, _) in claim.weights.items() if name not in stored]
    found = "all" if not missing else f"{len(missing)} missing, first {missing[0]}"
    verdict.check(f"{len(claim.weights)} weights stored as the recipe says", not missing, "all", found)
    strange = {name: size for name, size in stored.items() if name not in claim.weights.keys() | claim.known}
    first = ", ".join(f"{name} ({size} bytes)" for name, size in [*strange.items()][:5])
    found = f"{len(strange)}: {first}" if strange else "none"
    verdict.check("constants beside the weights", not strange, "none", found)
    predicted = sum(size for _, size in claim.weights.values())
    excess = abs(sum(stored.values()) / predicted - 1) if predicted else float(bool(stored))
    verdict.at_most("bytes of constants against prediction", excess, _SIZE_TOLERANCE)
    for kind, width in claim.widths.items():
        _check_width(verdict, kind, width, stored, unclaimed=sum(strange.values()))


def _check_width(
    verdict: Verdict, kind: str, width: Width, stored: Mapping[str, int], unclaimed: int
) -> None:
    """`unclaimed` bytes are of constants that nobody knows: they count where a part is missing that they may hold."""
    size = width.text_bytes + sum(stored.get(name, 0) for name in width.constants)
    if any(name not in stored for name in width.constants):
        size += unclaimed
    found = 8 * size / width.weights
    passed = abs(found / width.bits - 1) <= _SIZE_TOLERANCE
    verdict.check(
        f"{kind}: bits per weight", passed, f"{width.bits:.4f} within {_SIZE_TOLERANCE:.1%}", f"{found:.4f}"
    )


def text_of(data: mmap.mmap, constants: list[Constant]) -> bytes:
    """All of a program that is no constant: operations, names, debug information."""
    start, text = 0, []
    for constant in sorted(constants, key=lambda c: c.offset):
        text.append(data[start : constant.offset])
        start = constant.offset + constant.size
    return b"\n".join([*text, data[start:]])


def check_traces(verdict: Verdict, file: str, text: bytes) -> None:
    """Neither names by chance nor paths: of the usual places, and of this project, Python and user."""
    own = next((place for place in _own_places() if os.fsencode(place) in text), "none")
    hits = {
        "no random names": _first(_RANDOM_NAME, text),
        "no path of the building machine": _first(_MACHINE_PATH, text),
        "no path of this machine": own,
    }
    for name, hit in hits.items():
        verdict.check(f"{file}: {name}", hit == "none", "none", hit)


def _first(pattern: re.Pattern[bytes], text: bytes) -> str:
    hit = pattern.search(text)
    return "none" if hit is None else hit.group().decode(errors="replace")


def _own_places() -> list[str]:
    """The places that a bundle built here could name; a very short one, such as a home `/`, stands anywhere."""
    places = [str(_ROOT), os.path.expanduser("~"), sys.prefix]  # noqa: PTH111 (Path.home raises without a home)
    return [place for place in places if len(place) > 4]


def _check_interface(verdict: Verdict, bundle: Path, claim: Claim) -> None:
    described = isolated(runs.describe, bundle=str(bundle))
    found = {key: tuple(shape.tolist()) for key, shape in described.items()}
    for function in sorted(claim.static):
        tensors = {key: shape for key, shape in found.items() if key.startswith(f"{function}/")}
        moving = [f"{key} {shape}" for key, shape in tensors.items() if ANY_LENGTH in shape]
        text = "none" if tensors else "no such function"
        name = f"{function}: no input, state or output has a dynamic dimension"
        verdict.check(name, bool(tensors) and not moving, "none", moving[0] if moving else text)
    _check_signature(verdict, found, claim.signature)


def _check_signature(
    verdict: Verdict, found: Mapping[str, tuple[int, ...]], signature: Mapping[str, FunctionSpec]
) -> None:
    expected = {
        f"{function}/{side}/{index}/{name}/{tensor.dtype}": tensor.described()
        for function, spec in signature.items()
        for side, tensors in (("input", spec.inputs), ("output", spec.outputs), ("state", spec.states))
        for index, (name, tensor) in enumerate(tensors.items())
    }
    for key in sorted(expected.keys() | found.keys()):
        want, have = expected.get(key), found.get(key)
        if want != have:
            verdict.check(f"interface {key}", False, str(want or "not there"), str(have or "not there"))
            return
    verdict.check("interface", True, f"{len(expected)} tensors", f"{len(found)} tensors")
