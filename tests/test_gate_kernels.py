"""The gate over a bundle's Metal kernels: right bundles pass, and every fault that is put into a kernel is found.

A fault is one change in a copy of a .metal file. The bundle is exported from the copy, and the gate is given the copy
for the real one: so it is the execution that finds the fault, and not the comparison of texts.
"""

import copy
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.gate_inputs import judge
from tests.kernel_inputs import CODES, HEADS, MATVECS, WIDTHS, packed, palette, random_checkpoint
from tests.tiny import Dims
from workflow_scripts.checkpoint.text_config import FULL
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates import kernel_runs
from workflow_scripts.gates.kernel_runs import Case, Harness
from workflow_scripts.gates.kernel_source import _FOLDER, our_sources
from workflow_scripts.gates.kernels import Claim, gate_calls
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec, packed_matrix
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.msl.compiler import MODES
from workflow_scripts.msl.extract import describe, read_calls
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch

RECIPES = {8: "int8-kmeans-g32", 4: "int4-kmeans-g32"}
GATE, UP, DOWN = (f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
MODULES = {"matvec": MATVECS, "head": HEADS}
FORMS = {"matvec": "hostcache_metal", "head": "head_argmax_metal"}
NAMES = {"matvec": "palette_matvec", "head": "head_argmax"}
HIDDEN, MLP = 288, 64  # a lane takes 8 values of every 256: only a few lanes come to the rest of 32
BOTH = [(kind, bits) for kind in MODULES for bits in WIDTHS]


@pytest.fixture(scope="module")
def weights(tmp_path_factory, run_stage):
    """Width -> weights of a random model of one layer."""
    root = tmp_path_factory.mktemp("model")
    dims = Dims(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        layer_types=(FULL,),
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
    )
    inputs = random_checkpoint(run_stage, root, "gate_kernels", dims)
    return {
        bits: Weights.open(run_stage("weights", f"gate_kernels_{bits}", inputs, recipe=recipe))
        for bits, recipe in RECIPES.items()
    }


class ThreeLayers(torch.nn.Module):
    """The kernel calls of one MLP, without what lies in between."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, h):
        gate, up, down = self.layers
        return gate(x), up(x), down(h)


def kernel_of(kind, bits, text):
    """The binding's kernel with another text.

    A copy: a second TorchMetalKernel of one name would take the first one's torch operator away with it when it goes.
    """
    kernel = copy.copy(MODULES[kind][bits].KERNEL)
    kernel.src, kernel.kernel_cache, kernel._scalar_kernel_caches = text, {}, {}
    return kernel


def matvec_bundle(kernel, matrices, out, dtype="float16", layer=KernelMatvec):
    """Three calls on matrices gate, up, down."""
    shapes = {"x": HIDDEN, "h": MLP}, {"gate": MLP, "up": MLP, "down": HIDDEN}
    spec = FunctionSpec(
        *({name: TensorSpec(dtype, (1, 1, size)) for name, size in side.items()} for side in shapes)
    )
    model = ThreeLayers([layer(kernel, matrix) for matrix in matrices])
    save_bundle([Function("main", model, spec)], out, {}, [kernel])


def head_bundle(kernel, matrix, out, dtype="float16"):
    tiles = (len(matrix.words) // 8,)
    outputs = {"partial_values": TensorSpec("float32", tiles), "partial_indices": TensorSpec("int32", tiles)}
    spec = FunctionSpec({"hidden": TensorSpec(dtype, (1, 1, HIDDEN))}, outputs)
    save_bundle([Function("main", KernelHead(kernel, matrix), spec)], out, {}, [kernel])


def export(kind, bits, weights, text, out, dtype="float16"):
    """A bundle of one layer's calls, or of a head, whose kernel has the text."""
    out.mkdir()
    kernel = kernel_of(kind, bits, text)
    if kind == "matvec":
        matvec_bundle(kernel, matrices_of(weights, bits), out, dtype)
    else:
        (matrix,) = matrices_of(weights, bits, [HEAD_WEIGHT])
        head_bundle(kernel, matrix, out, dtype)
    return out


@pytest.fixture(scope="module")
def bundles(weights, tmp_path_factory):
    """(kind, bits) -> bundle with the kernel as it is."""
    home, sources = tmp_path_factory.mktemp("bundles"), our_sources()
    return {
        (kind, bits): export(
            kind, bits, weights, sources[f"{NAMES[kind]}_int{bits}"], home / f"{kind}{bits}.aimodel"
        )
        for kind, bits in BOTH
    }


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    """Run the gate; the failed checks and what they found.

    The bundle is read in this process, which no sound bundle ends; the runtime is compiled once per mode for all tests.
    """
    programs = tmp_path_factory.mktemp("programs")

    def run(bundle, claim, *modes):
        verdict = Verdict("kernels", bundle.name)
        gate_calls(verdict, read_calls(bundle, describe(str(bundle))), claim, Harness(programs, modes))
        assert verdict.checks
        return {check.name: check.found for check in verdict.checks if not check.passed}

    return run


def claim_of(kind, bits, weights, sources=None, compute="fp16"):
    return Claim(FORMS[kind], compute, weights[bits], sources or our_sources())


@pytest.mark.parametrize(("kind", "bits"), [("matvec", 4), ("head", 4), ("matvec", 8)])
def test_a_right_bundle_passes(bundles, weights, look, kind, bits):
    """The stage below has the fourth kernel, in every mode."""
    modes = MODES if (kind, bits) == ("matvec", 4) else MODES[:1]
    assert look(bundles[kind, bits], claim_of(kind, bits, weights), *modes) == {}


def test_a_right_float32_bundle_passes(weights, look, tmp_path):
    text = our_sources()["palette_matvec_int4"]
    bundle = export("matvec", 4, weights, text, tmp_path / "float32.aimodel", "float32")
    assert look(bundle, claim_of("matvec", 4, weights, compute="fp32"), "fast") == {}


class Fault(NamedTuple):
    """One change in a .metal file: the kernels it is put into, the mode that finds it, and what is said of it."""

    kernels: list
    old: str
    new: str
    mode: str
    check: str
    says: str


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
OWN, PAIRS = "own weights, fast: error / bound", "equal pairs, fast: rows"
FAULTS = {
    "the nibbles of a byte swapped": Fault(
        [("matvec", 4), ("head", 4)],
        "entries[w & 15], entries[(w >> 4) & 15]",
        "entries[(w >> 4) & 15], entries[w & 15]",
        "fast",
        OWN,
        " for ",
    ),
    "two bytes of a word swapped": Fault(
        [("matvec", 8)],
        "entries[a & 255], entries[(a >> 8) & 255]",
        "entries[(a >> 8) & 255], entries[a & 255]",
        "fast",
        OWN,
        " for ",
    ),
    "the barrier dropped": Fault(
        [("head", 4)],
        BARRIER,
        "\n",
        "thread",
        "thread",
        "data race: two threads use the same memory without a barrier in between, line",
    ),
    "the barrier dropped, without a sanitizer": Fault(
        [("matvec", 4)],
        BARRIER,
        "\n",
        "fast",
        "own weights, fast",
        "wrong-order: 56 of 64 elements of Y are others in schedule 1 than in schedule 0",
    ),
    "the codebook's groups shifted by one": Fault(
        [("matvec", 4), ("head", 8)],
        "CODEBOOK[thread_index, group.y]",
        "CODEBOOK[thread_index, (group.y + 1) % CODEBOOK.get_extent(1)]",
        "fast",
        OWN,
        " for ",
    ),
    "the codebook's next group": Fault(
        [("matvec", 4)],
        "CODEBOOK[thread_index, group.y]",
        "CODEBOOK[thread_index, group.y + 1]",
        "fast",
        "own weights, fast",
        "out of bounds: CODEBOOK[0, 2] at line",
    ),
    "a tie goes to the highest row": Fault(
        [("head", 4), ("head", 8)],
        "score > best",
        "score >= best",
        "fast",
        PAIRS,
        "row 7 for 6 in tile 0",
    ),
    "the row of the last comparison": Fault(
        [("head", 8)], "place = r;", "place = min(r + 1, 7u);", "fast", PAIRS, "row 14 for 13 in tile 1"
    ),
    "one value past the end of x": Fault(
        [("head", 4)],
        "float(X[k + 7, 0, 0])",
        "float(X[k + 8, 0, 0])",
        "fast",
        "own weights, fast",
        "out of bounds: X[288, 0, 0] at line",
    ),
    "one value past the end of threadgroup memory": Fault(
        [("matvec", 4)],
        "threadgroup float entries[16];",
        "threadgroup float entries[15];",
        "address",
        "address",
        "out of bounds: index 15 out of bounds for type 'float [15]', line",
    ),
    "the rest of K skipped": Fault(
        [("matvec", 4), ("head", 8)], "k < K; k += 256", "k + 256 <= K; k += 256", "fast", OWN, " for "
    ),
    "sums in half": Fault(
        [("matvec", 8)], "float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}", "half sums[4] = {}", "fast", OWN, " for "
    ),
    "a row never written": Fault(
        [("matvec", 4)],
        "if (lane == 0) {",
        "if (lane == 0 && row + r != 5) {",
        "fast",
        "own weights, fast",
        "uninitialised: 1 of 64 elements of Y are never written, first [0, 0, 5]",
    ),
    "every lane writes its part": Fault(
        [("matvec", 8)],
        "    if (lane == 0) {\n        Y[row + r, 0, 0] = total;\n    }",
        "    Y[row + r, 0, 0] = sums[r];",
        "fast",
        "own weights, fast",
        "wrong-order: ",
    ),
}


@pytest.mark.parametrize(
    ("fault", "kind", "bits"),
    [
        pytest.param(fault, kind, bits, id=f"{name}-{kind}{bits}")
        for name, fault in FAULTS.items()
        for kind, bits in fault.kernels
    ],
)
def test_a_fault_in_a_kernel_is_found_and_named(fault, kind, bits, weights, look, tmp_path):
    name = f"{NAMES[kind]}_int{bits}"
    copies = shutil.copytree(_FOLDER, tmp_path / "kernels")
    text = (copies / f"{name}.metal").read_text()
    assert text.count(fault.old) == 1
    (copies / f"{name}.metal").write_text(text.replace(fault.old, fault.new))
    sources = our_sources(copies)
    bundle = export(kind, bits, weights, sources[name], tmp_path / "fault.aimodel")
    failed = look(bundle, claim_of(kind, bits, weights, sources), fault.mode)
    assert all(check.startswith(name) for check in failed)
    said = [found for check, found in failed.items() if check.endswith(f", {fault.check}")]
    assert said and fault.says in said[0], failed
    if "line" in fault.says:
        lines = [int(line) for line in re.findall(rf"{name}\.metal:(\d+)", said[0])]
        named = "".join(sources[name].splitlines()[line - 1] for line in lines)
        assert "entries" in named or "X[k + 8" in named  # what each of these faults is about


def test_only_equal_pairs_show_a_wrong_order_of_comparison(weights, look, tmp_path):
    """Neither random scores nor tiles of equal rows do: it is why every pair has a tile."""
    loop = "for (uint r = {}) {{\n    const float score"
    text = our_sources()["head_argmax_int8"]
    old, new = loop.format("1; r < 8; ++r"), loop.format("7; r > 0; --r")
    assert text.count(old) == 1
    text = text.replace(old, new)
    bundle = export("head", 8, weights, text, tmp_path / "fault.aimodel")
    failed = look(bundle, claim_of("head", 8, weights, {"head_argmax_int8": text}), "fast")
    assert [check.split(", ", 2)[2] for check in failed] == [PAIRS, "equal pairs, fast: token"]


def refused(bundle, claim, look):
    """What is wrong with the calls themselves; they are not run then."""
    failed = look(bundle, claim)
    assert not any("own weights" in check for check in failed)
    return failed


def test_another_text_is_found(bundles, weights, look):
    ours = our_sources()
    edited = ours | {
        "head_argmax_int4": ours["head_argmax_int4"].replace("// The best row", "// The first row")
    }
    check = "source of head_argmax_int4_aaaaaaaa"
    bundle = bundles["head", 4]
    assert refused(bundle, claim_of("head", 4, weights, edited), look) == {check: "another text"}
    shorter = ours | {"head_argmax_int4": ours["head_argmax_int4"].partition("\n")[2]}
    assert refused(bundle, claim_of("head", 4, weights, shorter), look) == {check: "more than that text"}


def test_the_text_of_another_kernel_is_named(weights, look, tmp_path):
    text = our_sources()["palette_matvec_int8"]
    bundle = export("matvec", 4, weights, text, tmp_path / "other.aimodel")
    found = refused(bundle, claim_of("matvec", 4, weights), look)
    assert found == {"source of palette_matvec_int4_aaaaaaaa": "the text of palette_matvec_int8.metal"}


def test_a_call_too_few_and_another_kernel_are_found(bundles, weights, look):
    found = refused(bundles["head", 8], claim_of("matvec", 8, weights), look)
    assert found == {"calls of Metal kernels": "1"}
    found = refused(bundles["head", 8], claim_of("head", 4, weights), look)
    assert found["kernels called"] == "call 0 is head_argmax_int8_aaaaaaaa"
    assert "int32[128, 72], float16[4, 256]" in found["types, shapes and dispatch"]
    found = refused(bundles["head", 8], claim_of("head", 8, weights, compute="fp32"), look)
    assert "main: float16[1, 1, 288]" in found["types, shapes and dispatch"]


class FewerThreads(KernelMatvec):
    """Leaves out the last four rows."""

    def forward(self, x):
        rows = len(self.words)
        return self.kernel(
            x,
            self.words,
            self.codebook,
            threads_per_grid=(32, rows // 4 - 1, 1),
            threads_per_thread_group=(32, 8, 1),
            result_shapes=[[1, 1, rows]],
        )


def matrices_of(weights, bits, names=(GATE, UP, DOWN)):
    scratch = Scratch(Path(tempfile.gettempdir()))
    return [packed_matrix(weights[bits], name, bits, scratch) for name in names]


@pytest.mark.parametrize("change", ["dispatch", "order", "code", "entry"])
def test_wrong_calls_are_named(change, weights, look, tmp_path):
    kernel = kernel_of("matvec", 4, our_sources()["palette_matvec_int4"])
    matrices, layer = matrices_of(weights, 4), KernelMatvec
    if change == "dispatch":
        layer = FewerThreads
    elif change == "order":
        matrices = matrices_of(weights, 4, (UP, GATE, DOWN))
    elif change == "code":
        matrices[1].words[-1, -1] ^= 1 << 28
    else:
        matrices[2].codebook[5] = matrices[2].codebook[4]
    bundle = tmp_path / "wrong.aimodel"
    bundle.mkdir()
    matvec_bundle(kernel, matrices, bundle, layer=layer)
    said = {
        "dispatch": f"call 0 ({GATE}): main: float16[1, 1, 288], int32[64, 36], float16[2, 16] -> float16[1, 1, 64], "
        "[32, 15, 1] threads in groups of [32, 8, 1] in place of",
        "order": f"call 0 ({GATE}): it reads {UP}",
        "code": f"call 1 ({UP}): the words of row 63 are others",
        "entry": f"call 2 ({DOWN}): the codebook of palette group 5 is another",
    }
    (found,) = refused(bundle, claim_of("matvec", 4, weights), look).values()
    assert found.startswith(said[change])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES.keys())
def test_the_exact_scores_are_those_of_the_bindings_reference(bits, codes):
    """The gate judges without torch; what the kernels are defined by stays within the bound that it allows."""
    stored = palette(codes(bits), bits)
    x = np.random.default_rng(7).normal(0, 1, stored.indices.shape[1]).astype(np.float32)
    matrix = packed(stored)
    case = Case("", x, stored, matrix.words.numpy(), stored.codebook)
    exact, allowed = kernel_runs._exact(case)
    scores = MATVECS[bits].reference(torch.from_numpy(x)[None, None], matrix.words, matrix.codebook)
    assert (np.abs(scores[0, 0].numpy() - exact) <= allowed).all()
    values, indices = HEADS[bits].reference(torch.from_numpy(x)[None, None], matrix.words, matrix.codebook)
    verdict = Verdict("kernels", "reference")
    kernel_runs._judge_head(verdict, "reference", case, values.numpy(), indices.numpy())
    assert all(check.passed for check in verdict.checks)


def test_the_bound_is_narrower_than_one_term():
    """In a sum of many terms of one size, the loss of a single one is beyond the bound."""
    for terms in (96, 1536, 12288):
        assert terms * kernel_runs.sum_error(terms) < 1


def test_the_stage_judges_a_bundle_and_its_verdict_holds_no_figures_of_the_host(
    bundles, weights, tmp_path, monkeypatch
):
    inputs = {"bundle": bundles["head", 8], "weights": weights[8].tree}
    params = {"form": "head_argmax_metal", "compute": "fp16"}
    assert judge("gate_kernels", inputs, tmp_path / "verdict", **params) == {}
    verdict = json.loads((tmp_path / "verdict/verdict.json").read_text())
    assert {check["found"] for check in verdict["checks"] if "bound" in check["name"]} == {"within"}
    assert len(verdict["bounds"]) == 10 and set(verdict["bounds"].values()) == {1.0}
    monkeypatch.setenv("CXX", "no-such-compiler")
    (found,) = judge("gate_kernels", inputs, tmp_path / "no compiler", **params).values()
    assert "needs a C++23 compiler ($CXX names no-such-compiler, which is not found): install g++ 12" in found


def test_a_form_without_kernels_is_refused(bundles, weights, look):
    claim = Claim("head_argmax", "fp16", weights[8], our_sources())
    with pytest.raises(
        UserError, match="`head_argmax` calls no Metal kernels: those that do are hostcache_metal"
    ):
        look(bundles["head", 8], claim, "fast")


def test_a_damaged_bundle_fails_the_gate_and_not_the_process(bundles, weights, tmp_path):
    damaged = shutil.copytree(bundles["head", 4], tmp_path / "damaged.aimodel")
    program = damaged / "main.mlirb"
    program.write_bytes(program.read_bytes()[:-100])
    inputs = {"bundle": damaged, "weights": weights[4].tree}
    params = {"form": "head_argmax_metal", "compute": "fp16"}
    (found,) = judge("gate_kernels", inputs, tmp_path / "verdict", **params).values()
    assert "main.mlirb is damaged" in found
