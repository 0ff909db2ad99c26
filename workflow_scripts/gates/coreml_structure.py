"""Gate `coreml_structure`: is the Core ML reference what it claims to be, apart from what it computes.

Whole files, the interface, states that are read and written, and exactly the codes and steps that the recipe stores,
all read back out of the package.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workflow_scripts.coreml.contents import PACKAGE, SPECIFICATION, interface, stored_linear
from workflow_scripts.coreml.package import Package
from workflow_scripts.coreml.pruned_head import HEAD_ROWS, read_head_rows
from workflow_scripts.gates.structure import check_traces
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import FunctionSpec
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.raw import RawTables

_MODEL, _BLOB = "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"
_SMALL = 256  # elements below which a constant may be anything: axes, shapes, factors
_UNREPEATABLE = b"conversion_date"


@dataclass(frozen=True)
class Claim:
    """What the reference is made of; `ids` are the token ids of its head's rows."""

    weights: Weights
    tables: RawTables
    ids: list[int]
    context: int


def gate_coreml_structure(verdict: Verdict, folder: Path, claim: Claim) -> None:
    """All checks over the result folder of stage `export_coreml`."""
    name = f"{folder.name}{PACKAGE}"
    wanted = sorted([HEAD_ROWS, *(f"{name}/{file}" for file in (_MODEL, _BLOB, "Manifest.json"))])
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    verdict.check("files", files == wanted, ", ".join(wanted), ", ".join(files))
    ids = read_head_rows(folder)
    verdict.check(
        f"{HEAD_ROWS}: ids of the rows",
        ids == claim.ids,
        f"the tokenizer's {len(claim.ids)}",
        _rows(ids, claim.ids),
    )
    for file in (_MODEL, "Manifest.json"):
        text = (folder / name / file).read_bytes()
        check_traces(verdict, file, text)
        dated = "a date" if _UNREPEATABLE in text else "none"
        verdict.check(f"{file}: no date of the conversion", dated == "none", "none", dated)
    package = Package.open(folder / name)
    version = package.model.specificationVersion
    verdict.check("specification", version == SPECIFICATION, str(SPECIFICATION), str(version))
    expected = interface(claim.weights, claim.context, len(claim.ids))
    _check_interface(verdict, package.interface(), expected)
    _check_states(verdict, package, list(expected.states))
    _check_matrices(verdict, package, claim)
    _check_constants(verdict, package, claim)


def _rows(found: list[int], expected: list[int]) -> str:
    """What a list of ids is, beside the one it should be."""
    if found == expected:
        return f"the tokenizer's {len(expected)}"
    pairs = enumerate(zip(found, expected, strict=False))
    first = next(
        (f"row {row} is {have}, not {want}" for row, (have, want) in pairs if have != want), "too few or many"
    )
    return f"{len(found)} ids, {first}"


def _check_interface(verdict: Verdict, found: FunctionSpec, expected: FunctionSpec) -> None:
    for side in ("inputs", "outputs", "states"):
        have, want = (
            {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in getattr(spec, side).items()}
            for spec in (found, expected)
        )
        verdict.check(side, have == want, json.dumps(want), json.dumps(have))


def _check_states(verdict: Verdict, package: Package, states: list[str]) -> None:
    """A state that is not written loses the conversation; one that is read twice is read after it was written."""
    operations = package.function.operations
    read = Counter(op.input.name for op in operations if op.op_type == "read_state")
    written = Counter(op.state.name for op in operations if op.op_type == "coreml_update_state")
    for name in states:
        found = f"read {read[name]} times, written {written[name]} times"
        verdict.check(
            f"state {name}", found == "read 1 times, written 1 times", "read 1 times, written 1 times", found
        )


def _check_matrices(verdict: Verdict, package: Package, claim: Claim) -> None:
    """Every matrix of the recipe with its codes and steps, in 4 bits, and no other."""
    names = [name for name, entry in claim.weights.index.items() if entry["kind"] != "vector"]
    wanted: dict[str, str] = {}
    for name in track(names, "hash matrices", len(names)):
        stored = stored_linear(claim.weights, name, claim.ids)
        wanted[name] = _matrix_digest(stored.codes, stored.steps)
    matrices = package.matrices()
    found = Counter(_matrix_digest(codes, steps) for codes, steps, _ in matrices)
    missing = [name for name, digest in wanted.items() if found[digest] < 1]
    text = "all" if not missing else f"{len(missing)} missing, first {missing[0]}"
    verdict.check(f"{len(wanted)} matrices with the recipe's codes and steps", not missing, "all", text)
    strange = found - Counter(wanted.values())
    verdict.check("other matrices", not strange, "none", str(sum(strange.values()) or "none"))
    kinds = sorted({kind for _, _, kind in matrices})
    verdict.check("stored type of the codes", kinds == ["int4"], "int4", ", ".join(kinds) or "none")


def _check_constants(verdict: Verdict, package: Package, claim: Claim) -> None:
    """The embedding is the tables'; nothing else of size is there, such as a matrix that lost its codes."""
    tables, weights, constants = claim.tables, claim.weights, package.constants()
    must = {
        "embedding rows": tables.embed_rows,
        "embedding scales": tables.embed_scale,
        "per-layer projection": tables.projection,
    }
    digests = {
        name: _digest(array) for name, array in constants.items() if array.size >= _SMALL and array.any()
    }
    for name, array in must.items():
        there = array.size < _SMALL or _digest(array) in digests.values()
        verdict.check(f"{name} are the tables'", there, "equal", "equal" if there else "not there")
    vectors = [weights.vector(name) for name, entry in weights.index.items() if entry["kind"] == "vector"]
    columns = np.arange(claim.context, dtype=np.int32)
    window = weights.config.sliding_window
    ring = np.arange(window, dtype=np.int32)
    known = {_digest(array) for array in [*must.values(), *vectors, tables.projection_norm]}
    known |= {_digest(array) for array in (columns, columns % window, ring, ring + window)}
    strange = [name for name, digest in digests.items() if digest not in known]
    found = "none" if not strange else f"{len(strange)}, first {strange[0]} {constants[strange[0]].shape}"
    verdict.check("constants beside the weights", not strange, "none", found)


def _digest(array: np.ndarray) -> str:
    """Of the values in their order; axes of size one come and go. Float16 is looked at as float32."""
    values = np.ascontiguousarray(array, np.float32 if array.dtype == np.float16 else array.dtype)
    return f"{array.size} {hashlib.sha256(memoryview(values).cast('B')).hexdigest()}"


def _matrix_digest(codes: np.ndarray, steps: np.ndarray) -> str:
    return f"{codes.shape} {_digest(codes)} {_digest(steps)}"
