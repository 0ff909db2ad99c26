"""Gates `structure` and `numbers` over bundles whose kv_cache is a state: sound ones pass, each fault is named."""

import json
import shutil
from dataclasses import replace
from functools import cache

import gate_inputs as given
import numpy as np
import pytest
import torch
from gate_inputs import judge
from qat_checkpoint import write_qat_checkpoint

from workflow_scripts.coreai.convert import Function
from workflow_scripts.coreai.decode_host import CoreHost
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates import bounds
from workflow_scripts.gates.state_numbers import check_beyond_the_window, ways_of
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model.decode import Decode
from workflow_scripts.model.linear import DenseLinear, exported_linears
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import signature
from workflow_scripts.model.token_decoder import token_decoder
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch
from workflow_scripts.tables.open import open_tables

CONTEXT = 300  # more than stand in a program's text
LINEAR, QAT = "int4-linear-b32", "int4-qat-b32"
# Everything occurs once: every form, both compute types, and the tables in both layouts.
FORMS = {
    "stateful_core": {"recipe": "fp32", "compute": "fp32", "cache_minimum": 16},
    "ring_core": {"recipe": "fp32", "compute": "fp32", "cache_minimum": 16},
    "blend_core": {"recipe": "fp16", "compute": "fp16"},
    "decode": {"recipe": LINEAR, "compute": "fp16", "cache_minimum": 16},
    "decode_tbl": {"recipe": QAT, "compute": "fp16", "cache_minimum": 16},
    # The first is left before it is full.
    "decode_ring": {"recipe": LINEAR, "compute": "fp32", "capacities": [16, CONTEXT]},
}
READS = "the target is read and runs"


def params_of(form):
    sizes = {key: value for key, value in FORMS[form].items() if key != "recipe"}
    return {"form": form, "context": CONTEXT, **sizes}


def qat_checkpoint(run_stage, tmp_path_factory):
    small = given.kernel_evidence(run_stage, 4)["checkpoint"]
    source = write_qat_checkpoint(small / "source", tmp_path_factory.mktemp("qat") / "published")
    params = {"source": "qat", "allow_moving_revision": False, "sha256": {}, "num_hidden_layers": 2}
    return run_stage("checkpoint", "qat", {"source": source}, **params)


@pytest.fixture(scope="module")
def evidence(run_stage, tmp_path_factory):
    """Inputs of the gates over a form, but for a bundle."""

    @cache
    def of(form):
        recipe = FORMS[form]["recipe"]
        small = given.kernel_evidence(run_stage, 4)["checkpoint"]
        checkpoint = qat_checkpoint(run_stage, tmp_path_factory) if recipe == QAT else small
        found = given.recipe_evidence(run_stage, checkpoint, recipe)
        if not form.startswith("decode"):
            return found
        stage = "tables_int4" if recipe == QAT else "tables"
        tables = run_stage(stage, f"of_{checkpoint.name}", {"checkpoint": manifest_path(checkpoint)})
        inputs = {name: manifest_path(found[name]) for name in ("weights", "oracle")}
        inputs["tables"] = manifest_path(tables)
        reference = run_stage("decode_reference", f"{recipe}/{tables.name}", inputs)
        return found | {"tables": tables, "reference": reference}

    return of


@pytest.fixture(scope="module")
def bundles(run_stage, evidence):
    """A function that gives the real bundle of a form."""

    @cache
    def of(form):
        inputs = {
            name: manifest_path(tree)
            for name, tree in evidence(form).items()
            if name in ("weights", "tables")
        }
        return run_stage(f"export_{form}", f"state_{form}.aimodel", inputs, **params_of(form))

    return of


def structure(bundle, evidence, out, form, **changes):
    return judge("gate_structure_state", {**evidence, "bundle": bundle}, out, **(params_of(form) | changes))


def numbers(bundle, evidence, out, form, **changes):
    kind = "decode" if form.startswith("decode") else "state"
    return judge(f"gate_numbers_{kind}", {**evidence, "bundle": bundle}, out, **(params_of(form) | changes))


def checks(out):
    verdict = json.loads((out / "verdict.json").read_text())
    return {check["name"]: check["found"] for check in verdict["checks"]}


def copy(tree, tmp_path):
    return shutil.copytree(tree, tmp_path / "copy" / tree.name)


def edit_npz(path, change):
    with np.load(path) as stored:
        arrays = dict(stored)
    change(arrays)
    np.savez(path, **arrays)


# --- sound bundles -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_bundle_is_what_it_says(bundles, evidence, tmp_path, form):
    assert structure(bundles(form), evidence(form), tmp_path / "out", form) == {}
    found = checks(tmp_path / "out")
    # By hand: 4 bits and a float16 step per 32 weights, which float32 graphs hold as float32.
    dense, blocks = {"fp32": ("32.0000", "5.0000"), "fp16": ("16.0000", "4.5000")}[FORMS[form]["compute"]]
    bits = blocks if form.startswith("decode") else dense
    kinds = ("mlp", "other", "head") if form.startswith("decode") else ("mlp", "other")
    assert {name: text for name, text in found.items() if name.endswith("bits per weight")} == {
        f"{kind}: bits per weight": bits for kind in kinds
    }
    static = {
        "stateful_core": {"step"},
        "ring_core": {"step"},
        "blend_core": {"main"},
        "decode_ring": {"decode_16", "decode_300"},
    }.get(form, set())
    ending = ": no input, state or output has a dynamic dimension"
    assert {name.removesuffix(ending) for name in found if name.endswith(ending)} == static


@pytest.mark.parametrize("form", FORMS)
def test_a_sound_bundle_computes_what_the_reference_does(bundles, evidence, tmp_path, form):
    assert numbers(bundles(form), evidence(form), tmp_path / "out", form) == {}
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    limits = {bound for name, bound in verdict["bounds"].items() if "logits against" in name}
    assert limits == {bounds.FP32_LOGITS} if FORMS[form]["compute"] == "fp32" else 0.05 < max(limits) < 0.5
    found = checks(tmp_path / "out")
    assert found["babble: positions compared"] == "19 of 19"
    if "ring" in form:
        measured = json.loads((tmp_path / "out" / "measured.json").read_text())
        assert measured["positions beyond twice the window of 8"] == 3
    if form == "decode_ring":
        assert found["babble: capacities that ran"] == "[16, 300]"
    if form == "ring_core":
        assert sum(name.endswith("logits against the oracle") for name in found) == 5


def test_a_conversation_goes_from_one_function_to_the_other_in_the_same_states(bundles, evidence):
    """A block by `main`, then steps, and so on, in caches as long as those of `step`: equal to one pass in torch."""
    with np.load(evidence("ring_core")["reference"] / "measured.npz") as arrays:
        embeds, per_layer, expected = (arrays[f"babble.{kind}"] for kind in ("embeds", "ple", "hidden"))
    for form in ("stateful_core", "ring_core"):
        with open_bundle(bundles(form)) as program:
            host, start = CoreHost(program, CONTEXT), 0
            for length in (5, 0, 0, 0, 6, 0, 0, 1, 0):
                here = slice(start, start + (length or 1))
                found = (host.run if length else host.step)(embeds[here], per_layer[here])
                np.testing.assert_allclose(found, expected[here], atol=1e-5)
                start = here.stop
            few = CoreHost(program, 16)
            few.run(embeds[:5], per_layer[:5])
            with pytest.raises(UserError, match="step"):
                few.step(embeds[5:6], per_layer[5:6])


# --- structure ---------------------------------------------------------------------------------------------------


def test_another_shape_of_a_state_is_found(bundles, evidence, tmp_path):
    """A step over caches of 300 columns is no twin of a main of 32; main's own states have any length."""
    found = structure(bundles("ring_core"), evidence("ring_core"), tmp_path / "out", "ring_core", context=32)
    assert found.pop("interface step/state/2/fullKeyCache/float32") == "(1, 1, 1, 300, 64)"
    # The numbers of 300 columns, and by them more bytes than the weights have.
    assert found.keys() == {"constants beside the weights", "bytes of constants against prediction"}


def test_caches_that_do_not_grow_are_found(bundles, evidence, tmp_path):
    """A bundle with static caches in the place of one with growing ones."""
    found = structure(
        bundles("decode_ring"), evidence("decode_ring"), tmp_path / "out", "decode_tbl", cache_minimum=16
    )
    assert found["interface decode_16/input/0/input_ids/int32"] == "(1, 1)"


def test_a_dynamic_dimension_in_a_static_form_is_found(bundles, evidence, tmp_path):
    """As if the bundle of a form with growing caches were shipped as a static one."""
    form = "blend_core"
    inputs = {**evidence(form), "bundle": bundles("stateful_core")}
    found = judge("gate_structure_state", inputs, tmp_path / "out", **params_of(form))
    name = "main: no input, state or output has a dynamic dimension"
    assert found[name].startswith("main/input/0/inputs_embeds/float32 (1, -1, 96)")


def test_a_missing_static_function_is_found(bundles, evidence, tmp_path):
    found = structure(bundles("blend_core"), evidence("ring_core"), tmp_path / "out", "ring_core")
    assert found["step: no input, state or output has a dynamic dimension"] == "no such function"


@pytest.mark.parametrize(("damage", "bits"), [("float16", "16.0000"), ("embedding", "0.0000")])
def test_a_head_that_a_tool_passed_over_is_found(evidence, tmp_path, damage, bits):
    """Left in float16; or tied to the embedding, whose rows are then all that is stored."""
    form, inputs = "decode", evidence("decode")
    weights, tables = Weights.open(inputs["weights"]), open_tables(inputs["tables"])
    linear = exported_linears(weights, torch.float16, Scratch(tmp_path))

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rows", torch.from_numpy(tables.embed_rows))

        def forward(self, x):
            picked = torch.index_select(self.rows, 0, torch.zeros(x.shape[1], dtype=torch.int32)).to(x.dtype)
            return (x * picked[None]).sum(-1, keepdim=True).expand(1, 1, weights.config.vocab_size)

    def skipping(name):
        if name != HEAD_WEIGHT:
            return linear(name)
        if damage == "embedding":
            return Tied()
        return DenseLinear(torch.from_numpy(weights.linear(name).dequantize()).to(torch.float16))

    model = token_decoder(weights, tables, skipping, torch.float16)
    spec = signature(form, weights.config, CONTEXT, "fp16", cache_minimum=16)["main"]
    bundle = tmp_path / "skipped.aimodel"
    bundle.mkdir()
    functions = [Function("main", Decode(model), spec)]
    save_weights_bundle(functions, weights, form, "fp16", bundle, tables="int8")
    found = structure(bundle, inputs, tmp_path / "out", form)
    assert found.pop("head: bits per weight") == bits
    assert (
        "missing, first embed_tokens.weight"
        in found[next(name for name in found if "weights stored" in name)]
    )
    assert not any("bits per weight" in name for name in found)


# --- numbers of cores --------------------------------------------------------------------------------------------


def test_a_ring_off_by_one_is_found(bundles, evidence, tmp_path):
    """The table of columns goes around after seven positions in place of eight."""
    bundle = copy(bundles("ring_core"), tmp_path)
    program = bundle / "main.mlirb"
    numbers_ = np.arange(CONTEXT, dtype=np.int32)
    sound, wrong = (numbers_ % 8).tobytes(), (numbers_ % 7).tobytes()
    assert sound in program.read_bytes()
    program.write_bytes(program.read_bytes().replace(sound, wrong))
    found = numbers(bundle, evidence("ring_core"), tmp_path / "out", "ring_core")
    ways = {name for name in found if name.endswith("logits against the recipe's reference")}
    assert len(ways) == 5 and all("position " in found[name] for name in ways)


def test_another_position_of_the_reference_is_found_in_every_way(bundles, evidence, tmp_path):
    inputs = dict(evidence("stateful_core"))
    inputs["reference"] = copy(inputs["reference"], tmp_path)

    def shift(arrays):
        arrays["babble.logits"][17] = arrays["babble.logits"][16]

    edit_npz(inputs["reference"] / "measured.npz", shift)
    found = numbers(bundles("stateful_core"), inputs, tmp_path / "out", "stateful_core")
    against = [name for name in found if name.endswith("against the recipe's reference")]
    assert len(against) == 5 and all("at position 17, id" in found[name] for name in against)


@pytest.mark.parametrize(
    ("counts", "window", "passed"),
    [([16, 9], 8, False), ([9, 17], 8, True), ([], 8, False), ([30], 512, True)],
)
def test_a_ring_must_have_gone_around(counts, window, passed, tiny_weights):
    config = replace(Weights.open(tiny_weights["fp32"]).config, sliding_window=window)
    verdict = Verdict("numbers", "ring")
    check_beyond_the_window(verdict, config, counts)
    assert [check.passed for check in verdict.checks] == [passed]


@pytest.mark.parametrize("form", ["stateful_core", "ring_core"])
@pytest.mark.parametrize("count", [1, 2, 3, 19, 63])
def test_every_way_feeds_every_position_in_calls_that_the_form_takes(form, count, tiny_weights):
    config = Weights.open(tiny_weights["fp32"]).config
    ways = ways_of(form, config, CONTEXT, 16, count)
    assert len(ways) == 5
    for plan in ways.values():
        lengths = [length for _, length in plan["calls"]]
        assert sum(lengths) == count and min(lengths) > 0
        assert max(lengths) <= (config.sliding_window if form == "ring_core" else CONTEXT - 2)
        assert all(length == 1 for function, length in plan["calls"] if function == "step")
        steps = any(function == "step" for function, _ in plan["calls"])
        assert plan["columns"] == CONTEXT if steps else 16 <= plan["columns"] >= count


# --- numbers of token decoders -----------------------------------------------------------------------------------


def test_a_token_decoder_is_judged_position_by_position(bundles, evidence, tmp_path):
    inputs = dict(evidence("decode_ring"))
    inputs["reference"] = copy(inputs["reference"], tmp_path)

    def shift(arrays):
        arrays["babble.logits"][17] = arrays["babble.logits"][16]

    edit_npz(inputs["reference"] / "measured.npz", shift)
    found = numbers(bundles("decode_ring"), inputs, tmp_path / "out", "decode_ring")
    assert "at position 17, id" in found.pop("babble: logits against the decode reference")
    assert found.keys() <= {"babble: chosen ids"}


def test_a_capacity_that_did_not_run_is_found(bundles, evidence, tmp_path):
    found = numbers(
        bundles("decode_ring"),
        evidence("decode_ring"),
        tmp_path / "out",
        "decode_ring",
        capacities=[16, 32, 300],
    )
    assert found == {"babble: capacities that ran": "[16, 300]"}


def test_evidence_of_other_tables_is_refused(bundles, evidence, tmp_path):
    """The reference of the other layout, and tables of another checkpoint."""
    inputs = evidence("decode_ring") | {"reference": evidence("decode_tbl")["reference"]}
    found = numbers(bundles("decode_ring"), inputs, tmp_path / "reference", "decode_ring")
    assert found["tables of the reference"] == "int4-b32" and found["recipe of the reference"] == QAT
    inputs = evidence("decode_ring") | {"tables": evidence("decode_tbl")["tables"]}
    found = numbers(bundles("decode_ring"), inputs, tmp_path / "tables", "decode_ring")
    assert found.keys() == {"checkpoint of the tables", "tables of the reference"}


def test_a_decoder_made_with_another_layout_of_tables_does_not_run(bundles, evidence, tmp_path):
    inputs = evidence("decode_tbl")
    found = numbers(bundles("decode"), inputs, tmp_path / "out", "decode")
    assert "state_decode.aimodel is of checkpoint" in found[READS]


def test_the_bound_of_a_token_decoder_counts_each_of_its_sums(tiny_weights):
    """Beside those of the core: a projection and four roundings for every layer, and the head with two."""
    config = Weights.open(tiny_weights["fp32"]).config
    product, rounding = bounds.accumulator_error(config.hidden_size), bounds.FP16_ROUNDOFF**2 / 3
    more = config.num_hidden_layers * (product**2 + 4 * rounding) + product**2 + 2 * rounding
    found = bounds.decode_error(config, 23) ** 2 - bounds.core_error(config, 23) ** 2
    assert found == pytest.approx(more)
