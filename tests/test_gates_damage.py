"""Each check of each gate, on the real thing with one part damaged: that check fails, and the verdict is written."""

import dataclasses
import json
import shutil
import tracemalloc

import gate_inputs as given
import numpy as np
import pytest
import release_inputs
from gate_inputs import CONTEXT, INT4, INT8, judge

from workflow_scripts import manifest
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import read_header
from workflow_scripts.closure import ROOT
from workflow_scripts.coreai import bytecode
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.files import write_json
from workflow_scripts.gates import numbers, quantization, stored_weights, structure
from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.kernels.packing import pack
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Dense, Weights

READS = "the target is read and runs"
HEAD = {"form": "head_argmax", "compute": "fp16", "context": CONTEXT}
PROMPT = "What is the capital of France?"


def failed(verdict):
    return {check.name: check.found for check in verdict.checks if not check.passed}


def copy(tree, tmp_path):
    """A copy to damage, under the same name."""
    return shutil.copytree(tree, tmp_path / "copy" / tree.name)


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_npz(path, change):
    with np.load(path) as stored:
        arrays = dict(stored)
    change(arrays)
    np.savez(path, **arrays)


@pytest.fixture
def tables(tiny_tables, tmp_path):
    return copy(tiny_tables, tmp_path)


@pytest.fixture(scope="module")
def head(run_stage, tiny_weights):
    return given.head(run_stage, tiny_weights[INT8])


@pytest.fixture(scope="module")
def frontends(run_stage, tiny_tables, tiny_checkpoint):
    """By compute type."""
    return {c: given.frontend(run_stage, tiny_tables, tiny_checkpoint, c) for c in ("fp16", "fp32")}


@pytest.fixture(scope="module")
def core(run_stage, tiny_weights):
    return given.core(run_stage, tiny_weights["fp32"])


@pytest.fixture(scope="module")
def oracle(run_stage, tiny_checkpoint):
    return given.oracle(run_stage, tiny_checkpoint)


@pytest.fixture(scope="module")
def evidence(run_stage, tiny_checkpoint, tiny_weights, oracle):
    """Inputs of the gates over int8 weights, but for a bundle."""
    return {
        "checkpoint": tiny_checkpoint,
        "oracle": oracle,
        "weights": tiny_weights[INT8],
        "reference": given.reference(run_stage, tiny_checkpoint, tiny_weights[INT8]),
    }


# --- a gate that cannot go on ------------------------------------------------------------------------------------


def remove(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribble(path):
    path.write_bytes(b"[1, 2")


def erase_operations(path):
    """The container stays whole, so that nothing is noticed before the runtime reads what is in it."""
    data = bytearray(path.read_bytes())
    operations = bytecode._sections(data)[4]
    data[operations.start : operations.stop] = bytes(len(operations))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("metadata.json", remove),
        ("metadata.json", scribble),
        ("main.mlirb", remove),
        ("main.mlirb", empty),
        ("main.mlirb", halve),
        ("main.mlirb", scribble),
    ],
)
def test_the_structure_gate_writes_its_verdict_on_an_unreadable_bundle(
    head, evidence, tmp_path, file, damage
):
    bundle = copy(head, tmp_path)
    damage(bundle / file)
    assert READS in judge("gate_structure", {**evidence, "bundle": bundle}, tmp_path / "out", **HEAD)


def test_a_bundle_that_kills_its_process_replaces_an_old_verdict(
    run_stage, head, evidence, tmp_path, tiny_weights
):
    """Through the runner: of a result that passed once, the new verdict stays and the manifest goes."""
    inputs = {name: manifest_path(tree) for name, tree in evidence.items() if name != "checkpoint"}
    good = run_stage("gate_numbers", "twice", inputs | {"bundle": manifest_path(head)}, **HEAD)
    assert json.loads((good / "verdict.json").read_text())["verdict"] == "pass"
    bundle = copy(head, tmp_path)
    erase_operations(bundle / "main.mlirb")
    manifest.write_manifest(bundle, manifest.read_manifest(manifest_path(head)).ingredients)
    with pytest.raises(
        GateFailed, match=f"{READS}: expected no error, found the process that ran the bundle"
    ):
        run_stage("gate_numbers", "twice", inputs | {"bundle": manifest_path(bundle)}, **HEAD)
    assert json.loads((good / "verdict.json").read_text())["verdict"] == "fail"
    assert not manifest_path(good).exists()


@pytest.mark.parametrize("damage", [remove, empty, halve, scribble])
def test_unreadable_arrays_fail_the_gate(evidence, tmp_path, damage):
    reference = copy(evidence["reference"], tmp_path)
    damage(reference / "measured.npz")
    inputs = {**evidence, "reference": reference}
    assert list(judge("gate_quantization", inputs, tmp_path / "out", recipe=INT8, min_margin=0.1)) == [READS]


def test_a_folder_without_a_plan_fails_the_gates_over_folders(oracle, tmp_path):
    inputs = {"folder": tmp_path, "oracle": oracle}
    assert list(judge("gate_tokens", inputs, tmp_path / "tokens")) == [READS]
    assert list(judge("gate_chat", inputs, tmp_path / "chat", dialogues=["france"])) == [READS]


# --- structure ---------------------------------------------------------------------------------------------------


def claim_of(weights):
    said = {"form": "head_argmax", "compute": "fp16", "recipe": INT8, "checkpoint": weights.checkpoint_digest}
    constants = stored_weights.bundle_constants("head_argmax", weights, "fp16")
    return structure.Claim(signature("head_argmax", weights.config, CONTEXT, "fp16"), said, *constants)


@pytest.mark.parametrize(
    ("key", "value"), [("form", "head"), ("compute", "fp32"), ("recipe", "fp16"), ("checkpoint", "0" * 64)]
)
def test_a_bundle_that_says_it_is_another_is_found(head, evidence, tmp_path, key, value):
    bundle = copy(head, tmp_path)
    edit_json(bundle / "metadata.json", lambda m: m["creatorDefinedMetadata"].update({key: value}))
    found = judge("gate_structure", {**evidence, "bundle": bundle}, tmp_path / "out", **HEAD)
    assert found == {f"says its {key}": value[:16]}


def test_a_path_of_this_machine_in_the_metadata_is_found(head, evidence, tmp_path):
    bundle = copy(head, tmp_path)
    edit_json(bundle / "metadata.json", lambda m: m.update({"source": f"{ROOT}/model.py"}))
    found = judge("gate_structure", {**evidence, "bundle": bundle}, tmp_path / "out", **HEAD)
    assert found["metadata.json: no path of this machine"] == str(ROOT)


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        (b"resource_12345678", "no random names"),
        (b"/home/someone/model.py", "no path of the building machine"),
        (f"{ROOT}/x.py".encode(), "no path of this machine"),
    ],
)
def test_traces_are_sought_outside_of_constants_and_nowhere_else(head, planted, check):
    program = bytearray((head / "main.mlirb").read_bytes())
    constants = read_constants(head / "main.mlirb")
    largest = max(constants, key=lambda constant: constant.size)

    def traces(start):
        data = program.copy()
        data[start : start + len(planted)] = planted
        verdict = Verdict("structure", "head")
        structure.check_traces(verdict, "main.mlirb", structure.text_of(data, constants))
        return failed(verdict)

    assert traces(largest.offset + 8) == {}
    assert traces(16)[f"main.mlirb: {check}"] in planted.decode()


def test_a_constant_beside_the_weights_is_named(head, evidence):
    claim = claim_of(Weights.open(evidence["weights"]))
    stray = min(claim.weights, key=lambda name: claim.weights[name][1])
    rest = {name: weight for name, weight in claim.weights.items() if name != stray}
    verdict = Verdict("structure", "head")
    structure.gate_structure(verdict, head, dataclasses.replace(claim, weights=rest))
    assert stray in failed(verdict)["constants beside the weights"]
    verdict = Verdict("structure", "head")
    structure.gate_structure(verdict, head, dataclasses.replace(claim, weights=rest, known={stray}))
    assert "constants beside the weights" not in failed(verdict)


def test_only_the_rotary_frequencies_of_wide_heads_may_stand_beside_the_weights(tiny_checkpoint, tmp_path):
    """At E2B's widths: head_dim 512 has 256 of them, just enough to be stored as a large constant."""
    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.model.rope import RotaryEmbedding
    from workflow_scripts.model.signature import FunctionSpec, TensorSpec

    config = Checkpoint.open(tiny_checkpoint).config
    assert stored_weights.rotary_constants(config) == set()
    wide = dataclasses.replace(config, head_dim=256, global_head_dim=512)
    angles = TensorSpec("float32", (1, 1, 1, 512))
    spec = FunctionSpec({"position_ids": TensorSpec("int32", (1, 1))}, {"cos": angles, "sin": angles})
    rotary = RotaryEmbedding(wide.rope["full_attention"], 512)
    save_bundle([Function("main", rotary, spec)], tmp_path, {})
    stored = {constant.name for constant in read_constants(tmp_path / "main.mlirb")}
    assert stored == stored_weights.rotary_constants(wide) and len(stored) == 1


@pytest.mark.parametrize(
    ("array", "in_text"),
    [
        (np.arange(255), True),
        (np.arange(256), False),
        (np.full(1 << 21, 7, np.int8), True),
        (np.append(np.zeros(1 << 21, np.int8), 1), False),
        (np.zeros((300, 2), np.float16), True),
    ],
)
def test_small_and_repeated_constants_stand_in_the_text(array, in_text):
    assert stored_weights.in_text(stored_weights.Cast(array)) == in_text


@pytest.mark.parametrize(
    ("columns", "as_words", "as_bytes"), [(8, True, True), (32, True, False), (64, False, False)]
)
def test_packed_indices_are_small_by_the_number_of_their_elements(columns, as_words, as_bytes):
    """A kernel's words hold eight codes, an element of the plain form's bytes two; both have the same content."""
    indices = np.random.default_rng(0).integers(0, 16, (32, columns), np.uint8)
    words, elements = (stored_weights.Packed(indices, 4, np.dtype(dtype)) for dtype in ("<i4", "u1"))
    assert (stored_weights.in_text(words), stored_weights.in_text(elements)) == (as_words, as_bytes)
    assert words.nbytes == elements.nbytes == 16 * columns
    expected = structure.content_name(pack(indices, 4).tobytes())
    assert stored_weights.content_name(words) == stored_weights.content_name(elements) == expected


def test_large_constants_are_named_block_by_block():
    values = np.random.default_rng(0).normal(size=(3000, 2000)).astype(np.float16)
    cast = stored_weights.Cast(values, np.dtype(np.float32))
    expected = structure.content_name(values.astype(np.float32).tobytes())
    tracemalloc.start()
    try:
        assert (stored_weights.in_text(cast), cast.nbytes) == (False, 24_000_000)
        assert stored_weights.content_name(cast) == expected
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()


# --- numbers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_of_core(run_stage, tiny_checkpoint, tiny_weights, oracle, tmp_path_factory):
    """Evidence for the first positions of a dialogue, which are enough to judge a core."""
    folder = tmp_path_factory.mktemp("start")
    reference = given.reference(run_stage, tiny_checkpoint, tiny_weights["fp32"])
    shutil.copytree(reference, folder / "reference")
    shutil.copytree(oracle, folder / "oracle")
    for name in ("reference", "oracle"):
        edit_npz(folder / name / "measured.npz", lambda a: a.update({key: a[key][:6] for key in a}))
    weights = Weights.open(tiny_weights["fp32"])
    return numbers.Evidence(Oracle.open(folder / "oracle"), weights, folder / "reference")


def core_failures(core, evidence):
    verdict = Verdict("numbers", core.name)
    numbers.gate_core(verdict, core, evidence, "hostcache_core", "fp32", CONTEXT)
    assert len(verdict.checks) == 2
    return failed(verdict)


def test_a_core_is_judged_position_by_position(core, start_of_core, tmp_path):
    assert core_failures(core, start_of_core) == {}
    reference = copy(start_of_core.reference, tmp_path)

    def shift(arrays):
        arrays["france.logits"][3] = arrays["france.logits"][2]

    edit_npz(reference / "measured.npz", shift)
    found = core_failures(core, dataclasses.replace(start_of_core, reference=reference))
    assert list(found) == ["france: logits against the recipe's reference"]
    assert "at position 3, id" in found.popitem()[1]


@pytest.mark.parametrize("compute", ["fp16", "fp32"])
def test_a_front_end_with_another_scale_is_found(frontends, oracle, tables, tmp_path, compute):
    params = {"form": "frontend", "compute": compute, "context": CONTEXT}
    inputs = {"bundle": frontends[compute], "oracle": oracle, "tables": tables}
    assert judge("gate_numbers", inputs, tmp_path / "sound", **params) == {}
    scale = np.memmap(tables / "embed_tokens.scale.f32", np.float32, "r+")
    token = json.loads((oracle / "oracle.json").read_text())["dialogues"]["france"]["prompt_ids"][1]
    scale[token] *= 1.01
    scale.flush()
    found = judge("gate_numbers", inputs, tmp_path / "damaged", **params)
    assert f"at token {token}" in found[f"inputs_embeds: error beyond one {compute} rounding"]


def test_a_float32_front_end_may_not_round_to_float16(frontends, oracle, tiny_tables, tmp_path):
    inputs = {"bundle": frontends["fp16"], "oracle": oracle, "tables": tiny_tables}
    found = judge("gate_numbers", inputs, tmp_path / "out", form="frontend", compute="fp32", context=CONTEXT)
    assert "inputs_embeds: error beyond one fp32 rounding" in found


@pytest.mark.parametrize(
    ("input_", "file", "key", "check"),
    [
        ("oracle", "oracle.json", "checkpoint", "checkpoint of the oracle"),
        ("reference", "reference.json", "checkpoint", "checkpoint of the reference"),
        ("reference", "reference.json", "recipe", "recipe of the reference"),
    ],
)
def test_evidence_of_something_else_is_found(head, evidence, tmp_path, input_, file, key, check):
    tree = copy(evidence[input_], tmp_path)
    edit_json(tree / file, lambda record: record.update({key: "0123456789abcdefXYZ"}))
    found = judge("gate_numbers", {**evidence, input_: tree, "bundle": head}, tmp_path / "out", **HEAD)
    assert found == {check: "0123456789abcdef"}


def test_an_oracle_without_numbers_judges_no_bundle(head, evidence, tmp_path):
    tree = copy(evidence["oracle"], tmp_path)
    edit_json(tree / "oracle.json", lambda o: o["dialogues"]["france"].update(numbers=False))
    found = judge("gate_numbers", {**evidence, "oracle": tree, "bundle": head}, tmp_path / "out", **HEAD)
    assert found == {"dialogues with numbers": "none"}


def choices(logits, found, gated):
    dialogue = Dialogue("d", [], [2], [1] * 12, gated, stops=False, numbers=True, text="")
    verdict = Verdict("numbers", "head")
    numbers.compare_choice(verdict, dialogue, np.array(found), logits, 0.5)
    return failed(verdict)


def test_an_argmax_head_is_judged_where_the_choice_is_clear_and_that_must_be_often():
    logits = np.zeros((12, 3), np.float32)
    logits[:, 1] = 2
    assert choices(logits, [1] * 12, list(range(12))) == {}
    assert list(choices(logits, [1] * 11 + [2], list(range(12)))) == ["d: chosen ids"]
    logits[7:, 1] = 0.9  # closer than twice the bound
    assert choices(logits, [1] * 7 + [2] * 5, list(range(12))) == {"d: positions with a clear choice": "7"}
    assert choices(logits, [1] * 12, list(range(7))) == {}
    logits[:, 1] = 0
    assert choices(logits, [1] * 12, []) == {"d: positions with a clear choice": "0"}


def test_a_head_is_projected_block_by_block():
    """The whole matrix in float32 would take 40 MB, and its squares in float64 twice that."""
    rng = np.random.default_rng(0)
    head, hidden = (
        rng.normal(size=(20_000, 500)).astype(np.float16),
        rng.normal(size=(3, 500)).astype(np.float32),
    )
    tracemalloc.start()
    try:
        logits, norm = numbers.project(Dense(head), {"a": hidden[:1], "b": hidden[1:]}, 30.0)
        assert tracemalloc.get_traced_memory()[1] < 30e6
    finally:
        tracemalloc.stop()
    whole = head.astype(np.float64)
    expected = 30 * np.tanh(hidden.astype(np.float64) @ whole.T / 30)
    assert np.abs(np.concatenate([logits["a"], logits["b"]]) - expected).max() < 1e-4
    assert norm == pytest.approx(np.sqrt((whole**2).sum(1)).max())


# --- bundles with kernels ------------------------------------------------------------------------------------------


KERNEL_CHECKS = {
    "core": "babble: logits against the recipe's reference",
    "head": "babble: largest scores of the tiles",
}


@pytest.mark.parametrize("part", ["core", "head"])
def test_a_bundle_made_from_other_weights_is_found(run_stage, tmp_path, part):
    """One of the 8-bit weights is judged as if it were made from the 4-bit ones."""
    inputs = given.kernel_evidence(run_stage, 4) | {"bundle": given.kernel_bundle(run_stage, part, 8)}
    params = given.kernel_params(part, 8)
    found = judge("gate_structure", inputs, tmp_path / "structure", **params)
    assert {"says its recipe", "constants beside the weights"} < found.keys()
    assert any("missing, first " in text for text in found.values())
    found = judge("gate_numbers", inputs, tmp_path / "numbers", **params)
    assert "at position " in found[KERNEL_CHECKS[part]]


def swap_entries(stored):
    """Two rows of a codebook change places, as a shift by one group would do."""
    damaged = stored.codebook.copy()
    damaged[[0, 1]] = damaged[[1, 0]]
    return stored.codebook, damaged


def one_code_off(stored):
    """One index is off by one: of the lowest level, where levels are far apart."""
    damaged = stored.indices.copy()
    damaged[np.unravel_index(damaged.argmin(), damaged.shape)] += 1
    return pack(stored.indices, 8), pack(damaged, 8)


@pytest.mark.parametrize("damage", [swap_entries, one_code_off])
@pytest.mark.parametrize(("part", "name"), [("core", "layers.1.mlp.down_proj.weight"), ("head", HEAD_WEIGHT)])
def test_a_kernel_that_reads_something_else_is_found(run_stage, tmp_path, damage, part, name):
    """The bundle's own constants are damaged, so that its kernel, or what stands for it, computes with them."""
    evidence = given.kernel_evidence(run_stage, 8)
    bundle = copy(given.kernel_bundle(run_stage, part, 8), tmp_path)
    sound, damaged = damage(Weights.open(evidence["weights"]).linear(name))
    program = bundle / "main.mlirb"
    assert program.read_bytes().count(sound.tobytes()) == 1
    program.write_bytes(program.read_bytes().replace(sound.tobytes(), damaged.tobytes()))
    inputs = {**evidence, "bundle": bundle}
    found = judge("gate_numbers", inputs, tmp_path / "out", **given.kernel_params(part, 8))
    assert KERNEL_CHECKS[part] in found


def partials(values, indices, scores, bound=0.25):
    verdict = Verdict("numbers", "head")
    numbers.compare_partials(verdict, "d", np.array(values), np.array(indices), scores, bound)
    return failed(verdict)


LARGEST, IDS = "d: largest scores of the tiles", "d: ids of the tiles"


@pytest.mark.parametrize(
    ("values", "indices", "expected"),
    [
        ([[3, 1]], [[2, 15]], {}),
        ([[3, 1]], [[2, 14]], {}),  # as large within what sums can differ by
        ([[3, 1]], [[3, 15]], {IDS: "id 3 for 2 in tile 0 at position 0"}),
        ([[3, 1]], [[2, 7]], {IDS: "id 7 for 15 in tile 1 at position 0"}),
        ([[3, 1]], [[2, -1]], {IDS: "id -1 for 15 in tile 1 at position 0"}),
        ([[1, 3]], [[15, 2]], {LARGEST: "2 at position 0, id 0", IDS: "id 15 for 2 in tile 0"}),
        ([[3, np.nan]], [[2, 15]], {LARGEST: "nan at position 0, id 1"}),
        ([[3]], [[2]], {LARGEST: "shape (1, 1)", IDS: "shape (1, 1)"}),
    ],
)
def test_partial_maxima_are_judged_tile_by_tile(values, indices, expected):
    scores = np.zeros((1, 16), np.float32)
    scores[0, [2, 14, 15]] = 3, 0.9, 1
    found = partials(values, indices, scores)
    assert found.keys() == expected.keys()
    assert all(text in found[name] for name, text in expected.items())


def test_equal_scores_in_every_tile_are_no_evidence():
    found = partials([[0, 0]], [[0, 8]], np.zeros((1, 16), np.float32))
    assert found == {"d: tiles with a clear choice, at every position": "0"}


# --- quantization ------------------------------------------------------------------------------------------------


@pytest.fixture
def judge_weights(run_stage, tiny_checkpoint, tmp_path):
    """Runs the gate on a copy of a recipe's weights that was damaged by a function of the folder."""

    def run(damage, recipe=INT8, min_margin=0.1, of=INT8, **inputs):
        evidence = given.recipe_evidence(run_stage, tiny_checkpoint, of)
        weights = copy(evidence["weights"], tmp_path)
        damage(weights)
        return judge(
            "gate_quantization",
            {**evidence, "weights": weights, **inputs},
            tmp_path / "out",
            recipe=recipe,
            min_margin=min_margin,
        )

    return run


MATRIX = "layers.1.mlp.down_proj.weight"
REPORT, SNR = "quality report against the stored weights", "mlp: least SNR of a tensor, dB"
CODES = "mlp: a weight off its code"
MEANS = "mlp: entries off the means of their weights, of what is allowed"
BITS = "mlp: bits per weight as shipped"


def tensor(weights, part):
    """A stored tensor, mapped for writing."""
    info = read_header(weights / "core.safetensors")[part]
    dtype = {"U8": np.uint8, "F32": np.float32}[info.dtype]
    return np.memmap(info.path, dtype, "r+", offset=info.offset, shape=info.shape)


def nothing(weights):
    pass


def swap_rows(weights):
    rows = tensor(weights, f"{MATRIX}.indices")
    rows[[0, 32]] = rows[[32, 0]]


def raise_report(weights):
    edit_json(weights / "report.json", lambda report: report["tensors"][MATRIX].update(snr_db=60.0))


def forget_in_report(weights):
    edit_json(weights / "report.json", lambda report: report["tensors"].pop(MATRIX))


def alter_norm(weights):
    tensor(weights, "norm.weight")[3] += 0.5


def forget_checkpoint(weights):
    edit_json(weights / "weights.json", lambda index: index.update(checkpoint="0" * 64))


def forget_tensor(weights):
    edit_json(weights / "weights.json", lambda index: index["tensors"].pop("norm.weight"))


@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        (nothing, {}),
        (swap_rows, {SNR: MATRIX, REPORT: MATRIX, CODES: MATRIX, MEANS: MATRIX}),
        (raise_report, {REPORT: f"{MATRIX}: 60.0 dB, measured 4"}),
        (forget_in_report, {REPORT: MATRIX}),
        (alter_norm, {"76 vectors": "norm.weight"}),
        (forget_checkpoint, {"checkpoint of the weights": "000000000000"}),
        (forget_tensor, {"tensors of the checkpoint": "norm.weight"}),
    ],
)
def test_weights_that_are_not_the_checkpoints_are_found(judge_weights, damage, checks):
    found = judge_weights(damage)
    assert found.keys() == checks.keys()
    assert all(text in found[name] for name, text in checks.items())


def test_weights_of_another_recipe_are_found(judge_weights):
    palettes = "8-bit palettes per 32 rows"
    found = judge_weights(nothing, recipe="fp16")
    assert found["recipe"] == INT8
    assert all(found[f"{kind}: encoding"].startswith(palettes) for kind in ("mlp", "head", "other"))


def test_the_mixed_recipe_passes_with_the_bits_that_are_shipped(judge_weights, tmp_path):
    assert judge_weights(nothing, recipe=INT4, of=INT4) == {}
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    found = {check["name"]: check["found"] for check in verdict["checks"]}
    assert found["mlp: encoding"] == found["head: encoding"] == "4-bit palettes per 32 rows"
    assert found["other: encoding"] == "float16" and found["other: bits per weight as shipped"] == "16.0"
    # By hand, from 16 x 16 bits of codebook per 32 rows of 96 weights, or of 256 and 512 in down projections.
    assert (found["head: bits per weight as shipped"], found[BITS]) == ("4.0833", "4.0625")


def say_bits(weights):
    edit_json(weights / "report.json", lambda report: report["kinds"]["mlp"].update(bits_per_weight=8.0625))


def large_code(weights):
    tensor(weights, f"{MATRIX}.indices")[5, 7] = 16


def pass_as_mixed(weights):
    edit_json(weights / "weights.json", lambda index: index.update(recipe=INT4))


@pytest.mark.parametrize(
    ("damage", "of", "checks"),
    [
        (say_bits, INT4, {BITS: "8.0625"}),
        (large_code, INT4, {READS: f"{MATRIX} holds a code that 4 bits cannot hold"}),
        (
            pass_as_mixed,
            INT8,
            {f"{kind}: encoding": "8-bit palettes per 32 rows: " for kind in ("mlp", "head", "other")},
        ),
    ],
)
def test_what_is_not_the_mixed_recipe_is_found(judge_weights, damage, of, checks):
    found = judge_weights(damage, recipe=INT4, of=of)
    assert found.keys() == checks.keys()
    assert all(text in found[name] for name, text in checks.items())


def test_answers_must_be_chosen_by_the_margin(judge_weights):
    found = judge_weights(nothing, min_margin=50)
    assert list(found) == ["france: least margin"] and "at position" in found.popitem()[1]


def test_a_dialogue_without_gated_positions_is_a_failure(judge_weights, oracle, tmp_path):
    tree = copy(oracle, tmp_path / "ungated")
    edit_json(tree / "oracle.json", lambda o: o["dialogues"]["france"].update(gated=[]))
    assert judge_weights(nothing, oracle=tree) == {"france: gated positions": "none"}


def test_another_answer_is_found_at_its_position(judge_weights, evidence, tmp_path):
    reference = copy(evidence["reference"], tmp_path / "answers")

    def prefer(arrays):
        arrays["france.logits"][-1, 5] = 40

    edit_npz(reference / "measured.npz", prefer)
    found = judge_weights(nothing, reference=reference)
    assert (
        found["france: tokens"].startswith("7/8, first at position")
        and "5 for 106" in found["france: tokens"]
    )


def test_margins_are_those_of_the_wanted_id():
    logits = np.array([[1.0, 3.0, 2.5], [4.0, 1.0, 0.0]], np.float32)
    assert quantization.margins_of(logits, np.array([1, 2])).tolist() == [0.5, -4.0]


# --- tables ------------------------------------------------------------------------------------------------------


def shift_rows(tables):
    path = tables / "embed_per_layer.i8"
    width = json.loads((tables / "meta.json").read_text())["PLD"]
    data = path.read_bytes()
    path.write_bytes(data[width:] + data[:width])


def zero_rows(tables):
    """What an export that found no per-layer table ships: every answer is made of padding."""
    np.memmap(tables / "embed_per_layer.i8", np.int8, "r+")[:] = 0


def rows_of_another_checkpoint(tables):
    """Of the same shape, and with rows as long: only the values tell."""
    rows = np.memmap(tables / "embed_per_layer.i8", np.int8, "r+")
    rows[:] = np.random.default_rng(0).permutation(rows)


def one_step(tables):
    rows = np.memmap(tables / "embed_tokens.i8", np.int8, "r+")
    rows[5] += 1 if rows[5] < 127 else -1


def huge_scales(tables):
    """With steps as large as the weights themselves, zeros are within half a step of everything."""
    np.memmap(tables / "embed_tokens.scale.f32", np.float32, "r+")[:] = 1e9
    np.memmap(tables / "embed_tokens.i8", np.int8, "r+")[:] = 0


def no_scale(tables):
    np.memmap(tables / "embed_tokens.scale.f32", np.float32, "r+")[7] = np.nan


def alter_projection(tables):
    np.memmap(tables / "proj.f32", np.float32, "r+")[9] += 1e-3


def alter_norm_weight(tables):
    np.memmap(tables / "proj_norm.f32", np.float32, "r+")[0] += 1e-3


def alter_factor(tables):
    edit_json(tables / "meta.json", lambda meta: meta.update(input_scale=0.7))


PER_LAYER, EMBED = "embed_tokens_per_layer.weight", "embed_tokens.weight"
STEPS, ULP = "error beyond one ulp, in steps of its row", "error of a scale, in ulp"


@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        (nothing, {}),
        (shift_rows, {f"{PER_LAYER}: {STEPS}": "row"}),
        (zero_rows, {f"{PER_LAYER}: {STEPS}": "row"}),
        (rows_of_another_checkpoint, {f"{PER_LAYER}: {STEPS}": "row"}),
        (one_step, {f"{EMBED}: {STEPS}": "row 0"}),
        (huge_scales, {f"{EMBED}: {ULP}": "row"}),
        (no_scale, {f"{EMBED}: {ULP}": "nan at row 7", f"{EMBED}: {STEPS}": "nan at row 7"}),
        (alter_projection, {"per_layer_model_projection.weight: values": "rows from 0"}),
        (alter_norm_weight, {"per_layer_projection_norm.weight: values": "rows from 0"}),
        (alter_factor, {"meta.json": "input_scale is 0.7"}),
    ],
)
def test_tables_that_are_not_the_checkpoints_are_found(tables, tiny_checkpoint, tmp_path, damage, checks):
    damage(tables)
    found = judge("gate_tables", {"tables": tables, "checkpoint": tiny_checkpoint}, tmp_path / "out")
    assert found.keys() == checks.keys()
    assert all(text in found[name] for name, text in checks.items())


def test_tables_that_lack_a_file_fail_the_gate(tables, tiny_checkpoint, tmp_path):
    (tables / "proj.f32").unlink()
    found = judge("gate_tables", {"tables": tables, "checkpoint": tiny_checkpoint}, tmp_path / "out")
    assert list(found) == [READS] and "proj.f32" in found[READS]


# --- tokens, chat, and the folder they judge ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(run_stage, tiny_checkpoint, frontends, core, head):
    """A packaged set of real bundles."""
    bundles = {"frontend": frontends["fp32"], "core": core, "head": head}
    inputs = {f"bundle_{role}": manifest_path(tree) for role, tree in bundles.items()}
    return run_stage(
        "package",
        "folder",
        inputs | {"checkpoint": manifest_path(tiny_checkpoint)},
        folder="folder",
        slug="tiny",
        driver="hostcache",
        bundles={role: tree.name for role, tree in bundles.items()},
        tables=[],
        tables_in=None,
        chunks=None,
        language=None,
        tokenizer=True,
        context=CONTEXT,
    )


def test_another_reply_than_the_original_s_is_found(folder, oracle, tmp_path):
    tree = copy(oracle, tmp_path)

    def other(record):
        record["dialogues"]["france"]["text"] = "The capital of France is Lyon."
        record["dialogues"]["france"]["output_ids"][-2] = 5

    edit_json(tree / "oracle.json", other)
    found = judge("gate_chat", {"folder": folder, "oracle": tree}, tmp_path / "out", dialogues=["france"])
    assert found.keys() == {f"france: {PROMPT}", "france: ids"}
    assert found[f"france: {PROMPT}"] == "'The capital of France is Paris.'"


def test_a_chat_that_the_oracle_does_not_know_is_a_failure(folder, oracle, tmp_path):
    found = judge("gate_chat", {"folder": folder, "oracle": oracle}, tmp_path / "out", dialogues=["rome"])
    assert found == {"dialogues": "no rome"}


def test_a_gate_without_a_dialogue_of_its_kind_says_so(oracle, tmp_path):
    found = judge("gate_long_run", {"folder": tmp_path, "oracle": oracle}, tmp_path / "out")
    assert found == {"dialogues": "no dialogue reaches 256 positions"}


def test_another_token_is_found_in_the_packaged_set(folder, oracle, tiny_checkpoint, tmp_path):
    tree = copy(oracle, tmp_path)
    edit_json(tree / "oracle.json", lambda o: o["dialogues"]["france"]["output_ids"].__setitem__(-1, 5))
    found = judge(
        "gate_tokens",
        {"folder": folder, "oracle": tree, "checkpoint": tiny_checkpoint},
        tmp_path / "out",
    )
    assert (
        found["france: tokens"].startswith("7/8, first at position")
        and "106 for 5" in found["france: tokens"]
    )


# --- what is published is of one checkpoint ----------------------------------------------------------------------


def test_a_bundle_of_another_checkpoint_is_not_packaged(tmp_path):
    inputs = release_inputs.package_inputs(tmp_path)
    inputs["bundle_core"] = release_inputs.bundle(tmp_path, "core_fp16", b"core", made_from="cd" * 32)
    with pytest.raises(UserError, match=r"core_fp16\.aimodel was made from another checkpoint .*says cdcdcd"):
        release_inputs.build_package(tmp_path, inputs, release_inputs.package_params())


def test_a_bundle_that_names_no_checkpoint_is_not_packaged(tmp_path):
    inputs = release_inputs.package_inputs(tmp_path)
    files = {"main.mlirb": b"core", "metadata.json": "{}"}
    inputs["bundle_core"] = release_inputs.result(tmp_path, "export", "core_fp16.aimodel", files)
    with pytest.raises(UserError, match="does not say which checkpoint"):
        release_inputs.build_package(tmp_path, inputs, release_inputs.package_params())


def test_a_folder_with_a_bundle_of_another_checkpoint_is_not_released(tmp_path):
    inputs = release_inputs.release_inputs(tmp_path)
    tree = manifest.tree_path(inputs["folder_macos"])
    ingredients = manifest.read_manifest(inputs["folder_macos"]).ingredients
    path = tree / "tiny_core.aimodel" / "metadata.json"
    path.unlink()  # it may be a hard link
    write_json(path, {"creatorDefinedMetadata": {"checkpoint": "cd" * 32}})
    manifest.write_manifest(tree, ingredients)
    with pytest.raises(UserError, match=r"tiny_core\.aimodel was made from another checkpoint"):
        release_inputs.build_release(tmp_path, inputs, release_inputs.release_params())
