"""Gates pass what is right and catch what is not, on real bundles and on damaged copies of them."""

import json
import shutil
from dataclasses import replace

import gate_inputs as given
import numpy as np
import pytest
from gate_inputs import INT8, judge

from workflow_scripts import manifest
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.gates import bounds, numbers, stored_weights
from workflow_scripts.gates.oracle import Dialogue
from workflow_scripts.gates.quantization import gate_tensors
from workflow_scripts.gates.structure import Claim, gate_structure
from workflow_scripts.gates.tokens import (
    LONG_RUN,
    cut_to_fit,
    gate_answers,
    gate_dialogue,
    gate_tokenizer,
    that_fit,
)
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.recipes import get_recipe
from workflow_scripts.quantize.weights import Weights


def failures(verdict):
    return [check.name for check in verdict.checks if not check.passed]


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return Checkpoint.open(tiny_checkpoint).config


@pytest.fixture(scope="module")
def weights(tiny_weights):
    return Weights.open(tiny_weights[INT8])


@pytest.fixture(scope="module")
def head(run_stage, tiny_weights):
    """A real int8 argmax head."""
    return given.head(run_stage, tiny_weights[INT8])


def structure_of(bundle, config, weights, form="head_argmax", compute="fp16"):
    verdict = Verdict("structure", "head")
    said = {
        "form": "head_argmax",
        "compute": compute,
        "recipe": INT8,
        "checkpoint": weights.checkpoint_digest,
    }
    constants = stored_weights.bundle_constants("head_argmax", weights, compute)
    gate_structure(verdict, bundle, Claim(signature(form, config, 64, compute), said, *constants))
    return failures(verdict)


def test_a_sound_bundle_passes_the_structure_gate(head, config, weights):
    assert structure_of(head, config, weights) == []


def damage_constant(program):
    data = bytearray(program.read_bytes())
    data[read_constants(program)[0].offset] ^= 1
    program.write_bytes(data)


def test_one_flipped_bit_of_a_weight_is_found(head, config, weights, tmp_path):
    bundle = shutil.copytree(head, tmp_path / "head.aimodel")
    damage_constant(bundle / "main.mlirb")
    assert structure_of(bundle, config, weights) == ["main.hash", "constants are named by content"]


def test_weights_in_another_width_are_found(head, config, tiny_weights):
    """A tool that skips a tensor silently leaves it in float16: the recipe's codes are not in the bundle."""
    found = structure_of(head, config, Weights.open(tiny_weights["fp16"]))
    assert "1 weights stored as the recipe says" in found
    assert "bytes of constants against prediction" in found
    assert "head: bits per weight" in found


def test_another_interface_is_found(head, config, weights):
    assert any(name.startswith("interface") for name in structure_of(head, config, weights, form="head"))


def test_machine_paths_random_names_and_strays_are_found(head, config, weights, tmp_path):
    bundle = shutil.copytree(head, tmp_path / "head.aimodel")
    (bundle / "stray").write_text("")
    metadata = json.loads((bundle / "metadata.json").read_text())
    del metadata["producer"]
    metadata["creationDate"] = "20261201T120000Z"
    (bundle / "metadata.json").write_text(json.dumps(metadata))
    assert structure_of(bundle, config, weights) == ["files", "producer", "creation date"]


@pytest.fixture(scope="module")
def judged(run_stage, tiny_checkpoint, tiny_weights):
    """A function that runs the stage `gate_numbers` on a head."""
    oracle = given.oracle(run_stage, tiny_checkpoint)
    reference = given.reference(run_stage, tiny_checkpoint, tiny_weights[INT8])

    def run(bundle, artifact="head"):
        evidence = {
            "bundle": manifest_path(bundle),
            "oracle": manifest_path(oracle),
            "weights": manifest_path(tiny_weights[INT8]),
            "reference": manifest_path(reference),
        }
        return run_stage("gate_numbers", artifact, evidence, form="head_argmax", compute="fp16", context=64)

    return run


def test_the_numbers_gate_runs_the_real_head(judged, head):
    tree = judged(head)
    verdict = json.loads((tree / "verdict.json").read_text())
    assert verdict["verdict"] == "pass" and verdict["reason"] is None
    assert json.loads((tree / "measured.json").read_text())["france: positions with a clear choice"] >= 8


def test_a_wrong_head_fails_with_position_and_tokens_and_keeps_its_verdict(
    judged, head, tmp_path, run_stage, tiny_weights
):
    """The bytes of two rows of codes are swapped in the program: it still loads and runs."""
    tree = shutil.copytree(head, tmp_path / "bad.aimodel")
    program = tree / "main.mlirb"
    codes = max(read_constants(program), key=lambda constant: constant.size)
    data = bytearray(program.read_bytes())
    half = codes.size // 2
    first, second = (
        data[codes.offset : codes.offset + half],
        data[codes.offset + half : codes.offset + codes.size],
    )
    data[codes.offset : codes.offset + codes.size] = second + first
    program.write_bytes(data)
    manifest.write_manifest(tree, manifest.read_manifest(manifest_path(head)).ingredients)
    with pytest.raises(
        GateFailed,
        match=r"bad\.aimodel: france: chosen ids: expected [^,]*, found id \d+ for \d+ at position \d+",
    ):
        judged(tree, "bad")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("part", ["core", "head"])
def test_sound_bundles_with_kernels_pass(run_stage, tmp_path, part, bits):
    """In float32, which the 8-bit bundles here compute in, a core is held to 1e-4."""
    bundle = given.kernel_bundle(run_stage, part, bits)
    inputs = {**given.kernel_evidence(run_stage, bits), "bundle": bundle}
    params = given.kernel_params(part, bits)
    assert judge("gate_structure", inputs, tmp_path / "structure", **params) == {}
    assert judge("gate_numbers", inputs, tmp_path / "numbers", **params) == {}
    judged = json.loads((tmp_path / "numbers" / "verdict.json").read_text())["bounds"]
    if part == "core":
        (bound,) = judged.values()
        assert bound == 1e-4 if bits == 8 else 0 < bound < 0.2
    else:
        assert judged["babble: largest scores of the tiles"] < 1e-4


@pytest.mark.parametrize("recipe", [given.INT4, "int4-linear-b32"])
def test_4_bits_are_stored_packed_without_kernels_too(run_stage, tmp_path, recipe):
    evidence = given.kernel_evidence(run_stage, 4)
    checkpoint = {"checkpoint": manifest_path(evidence["checkpoint"])}
    tree = run_stage("weights", f"plain_{recipe}", checkpoint, recipe=recipe)
    verdict = Verdict("quantization", recipe)
    gate_tensors(verdict, Checkpoint.open(evidence["checkpoint"]), Weights.open(tree), get_recipe(recipe))
    assert failures(verdict) == []
    params = {"form": "head_argmax", "compute": "fp16", "context": given.CONTEXT}
    bundle = run_stage("export_head", f"{recipe}.aimodel", {"weights": manifest_path(tree)}, **params)
    inputs = {**evidence, "weights": tree, "bundle": bundle}
    assert judge("gate_structure", inputs, tmp_path / "out", **params) == {}
    config = Checkpoint.open(evidence["checkpoint"]).config
    codes = config.vocab_size * config.hidden_size
    assert codes // 2 in {constant.size for constant in read_constants(bundle / "main.mlirb")}


def test_a_failed_gate_keeps_its_table_but_has_no_manifest(tmp_path):
    verdict = Verdict("numbers", "thing")
    verdict.at_most("error", 2.0, 1.0, "position 3")
    with pytest.raises(
        GateFailed, match=r"gate numbers failed on thing: error: expected <= 1, found 2 at position 3"
    ):
        verdict.conclude(tmp_path)
    assert "FAIL" in (tmp_path / "measured_table.txt").read_text()
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "fail"


def test_a_gate_that_compares_nothing_is_no_pass(tmp_path):
    with pytest.raises(GateFailed, match="comparisons: expected at least one, found none"):
        Verdict("numbers", "thing").conclude(tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "fail"


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.1])
def test_nan_and_infinity_never_pass(value, tmp_path):
    verdict = Verdict("numbers", "thing")
    found = np.zeros((2, 3), np.float32)
    found[1, 2] = value
    numbers.compare(verdict, "logits", found, np.zeros((2, 3), np.float32), 1.0)
    assert failures(verdict) == ["logits"] and "position 1, id 2" in verdict.checks[0].found
    with pytest.raises(GateFailed):  # JSON has no NaN, which must not keep the verdict from being written
        verdict.conclude(tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["verdict"] == "fail"


@pytest.mark.parametrize("bound", [np.nan, np.inf])
def test_a_bound_that_is_no_number_lets_nothing_pass(bound, tmp_path):
    verdict = Verdict("numbers", "thing")
    verdict.at_most("error", 0.0, bound)
    with pytest.raises(GateFailed):
        verdict.conclude(tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text())["bounds"] == {"error": None}


def dialogue(**changes):
    fields = {
        "messages": [],
        "prompt_ids": [2, 5],
        "output_ids": [7, 8, 106],
        "gated": [0, 1, 2],
        "stops": True,
    }
    return Dialogue(name="d", numbers=False, text="", **(fields | changes))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([0, 7, 8, 106], []),
        ([0, 7, 9, 106], ["d: tokens"]),
        ([0, 7, 8, 9], ["d: tokens", "d: stop token"]),
        ([7, 8, 106, 0], ["d: tokens", "d: stop token"]),  # shifted by one position
    ],
)
def test_tokens_are_compared_at_their_positions(chosen, expected):
    verdict = Verdict("tokens", "folder")
    gate_dialogue(verdict, dialogue(), np.array(chosen))
    assert failures(verdict) == expected
    if expected:
        assert "first at position" in verdict.checks[0].found


def test_an_ungated_tie_may_differ_and_nothing_gated_is_no_pass():
    verdict = Verdict("tokens", "folder")
    gate_dialogue(verdict, dialogue(gated=[0, 2]), np.array([0, 7, 99, 106]))
    assert failures(verdict) == []
    gate_dialogue(verdict, dialogue(gated=[], stops=False), np.array([0, 7, 8, 106]))
    assert failures(verdict) == ["d: tokens"]


def test_long_dialogues_belong_to_the_long_run():
    assert not dialogue().is_long
    assert dialogue(output_ids=list(range(LONG_RUN))).is_long


@pytest.mark.parametrize(("room", "outputs"), [(4, 3), (3, 2), (2, 1), (1, 0)])
def test_a_long_dialogue_goes_as_far_as_a_set_has_positions(room, outputs):
    verdict = Verdict("long_run", "folder")
    (cut,) = cut_to_fit(verdict, [dialogue()], room)
    assert cut.output_ids == [7, 8, 106][:outputs] and cut.gated == [0, 1, 2][:outputs]
    assert cut.stops == (outputs == 3)
    assert failures(verdict) == ([] if outputs else ["d: positions fed"])  # a prompt alone gates nothing
    assert [check.found for check in verdict.checks if check.passed] == (
        [f"{room} of 4"] if 0 < outputs < 3 else []
    )


def spoken(**changes):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "two"},
    ]
    return replace(dialogue(messages=messages), text="7 8", **changes)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([[7, 106], [7, 8, 106]], []),
        ([[7, 1], [7, 8, 106]], []),  # of an earlier answer the text alone is known
        ([[9, 106], [7, 8, 106]], ["d: one"]),
        ([[7, 106], [7, 8, 1]], ["d: ids"]),
        ([[7, 106], [7, 8, 8]], ["d: two", "d: answer 2 stops", "d: ids"]),
        ([[7, 7], [7, 8, 106]], ["d: one", "d: answer 1 stops"]),
    ],
)
def test_free_answers_are_the_original_s_and_stop(answers, expected):
    verdict = Verdict("chat", "folder")
    found = {f"d.answer{number}": np.array(ids) for number, ids in enumerate(answers)}
    gate_answers(verdict, spoken(), found, [1, 106], lambda ids: " ".join(map(str, ids)))
    assert failures(verdict) == expected
    assert verdict.tokens == {f"d, answer {number}": ids for number, ids in enumerate(answers, 1)}


def test_dialogues_beyond_the_positions_of_a_set_are_left_out_and_named():
    short, long = dialogue(), replace(dialogue(output_ids=list(range(20))), name="e")
    room = len(short.fed_ids)
    verdict = Verdict("tokens", "folder")
    assert that_fit(verdict, [short], room) == [short] and verdict.checks == []
    assert that_fit(verdict, [short, long], room) == [short] and failures(verdict) == []
    assert verdict.checks[0].found == f"d; e not fed: longer than the {room} positions of this set"
    assert that_fit(verdict, [short, long], room - 1) == []
    assert failures(verdict) == ["dialogues that fit"]


def test_the_float16_bound_is_the_measured_accumulator():
    """facts: rms error of a sequential float16 sum of K products, relative, within a factor of two of u*sqrt(K/6)."""
    numbers_ = np.random.default_rng(0)
    for terms in (64, 512, 1536):
        products = numbers_.normal(size=(200, terms)).astype(np.float32)
        sums = np.zeros(200, np.float16)
        for column in products.T:
            sums = (sums + column.astype(np.float16)).astype(np.float16)
        exact = products.astype(np.float16).astype(np.float64).sum(1)
        relative = np.sqrt(((sums - exact) ** 2).mean()) / np.sqrt((exact**2).mean())
        assert 0.5 < relative / bounds.accumulator_error(terms) < 2


def relative(found, exact):
    return np.sqrt(np.square(found - exact).mean()) / np.sqrt(np.square(exact).mean())


def gelu(x):
    return x / 2 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def half(x):
    return x.astype(np.float16).astype(np.float64)


def test_the_bound_of_a_kernel_mlp_is_what_its_roundings_cost():
    """Against one MLP in numpy: float32 sums, each result rounded to float16."""
    numbers_ = np.random.default_rng(0)
    x = numbers_.normal(size=(200, 96))
    gate, up, down = (half(numbers_.normal(size=shape)) for shape in ((96, 256), (96, 256), (256, 96)))
    exact = (gelu(x @ gate / 10) * (x @ up / 10)) @ down
    rounded = half(x)
    middle = half(half(gelu(half(rounded @ gate / 10))) * half(rounded @ up / 10))
    per_layer = bounds.FP16_ROUNDOFF * (bounds.MLP_ROUNDINGS / 3) ** 0.5
    assert 0.3 < relative(half(middle @ down), exact) / per_layer < 1


def test_a_core_with_kernels_has_the_tighter_bound(config):
    with_kernels, without = bounds.metal_core_error(config, 64), bounds.core_error(config, 64)
    mlp = [n for layer in range(10) for n in (96, 96, 512 if config.is_shared(layer) else 256)]
    assert without**2 - with_kernels**2 == pytest.approx(
        sum(bounds.accumulator_error(n) ** 2 for n in mlp) - 10 * 6 * bounds.FP16_ROUNDOFF**2 / 3
    )
    assert with_kernels < 0.8 * without


@pytest.mark.parametrize("aligned", [False, True])
def test_the_bound_of_partial_maxima_holds_for_float32_sums_of_any_sign(aligned):
    """Also where a row points along the hidden state, so that partial sums only grow."""
    numbers_ = np.random.default_rng(0)
    for terms in (96, 1536):
        hidden = numbers_.normal(size=(300, terms)).astype(np.float32)
        row = hidden if aligned else numbers_.normal(size=(300, terms)).astype(np.float32)
        sums = np.zeros(300, np.float32)
        for products in (hidden * row).T:
            sums = sums + products
        exact = (hidden.astype(np.float64) * row).sum(1)
        sizes = np.sqrt(
            np.square(hidden.astype(np.float64)).mean(1) * np.square(row.astype(np.float64)).sum(1)
        )
        errors = np.abs(sums - exact) / sizes
        bound = 6 * bounds.metal_score_error(terms)
        assert errors.max() < bound < (30 if aligned else 1000) * errors.max()


def test_the_oracle_refuses_a_close_call(run_stage, tiny_checkpoint):
    dialogues = [{"name": "babble", "prompt_ids": [2, 105, 300, 301, 302], "new_tokens": 40}]
    inputs = {"checkpoint": manifest_path(tiny_checkpoint)}
    with pytest.raises(UserError, match=r"`babble`: the margin .* at position \d+ is under 50"):
        run_stage("oracle", "close", inputs, min_margin=50, dialogues=dialogues)
    tree = run_stage("oracle", "ties", inputs, min_margin=50, dialogues=[dialogues[0] | {"skip_ties": True}])
    assert json.loads((tree / "oracle.json").read_text())["dialogues"]["babble"]["gated"] == []


def test_the_oracle_refuses_other_weights_than_expected(run_stage, tiny_checkpoint):
    dialogues = [{"name": "known", "prompt_ids": [2, 105], "new_tokens": 2, "expect_ids": [1, 1]}]
    with pytest.raises(UserError, match=r"`known`: the checkpoint answers ids .*not the weights"):
        run_stage(
            "oracle",
            "other",
            {"checkpoint": manifest_path(tiny_checkpoint)},
            min_margin=0,
            dialogues=dialogues,
        )


def test_head_weight_is_in_every_recipe(weights):
    assert weights.linear(HEAD_WEIGHT).dequantize(slice(0, 2)).shape == (2, weights.config.hidden_size)


@pytest.mark.parametrize(
    ("encoded", "decoded", "expected"),
    [
        ([2, 5], "", []),
        ([2, 6], "", ["d: prompt ids"]),
        ([2], "", ["d: prompt ids"]),
        ([2, 5, 9], "", ["d: prompt ids"]),
        ([2, 5], "other", ["d: text"]),
    ],
)
def test_the_packaged_tokenizer_must_give_the_oracles_ids_and_text(encoded, decoded, expected):
    verdict = Verdict("tokens", "folder")
    gate_tokenizer(verdict, dialogue(), encoded, decoded)
    assert failures(verdict) == expected
