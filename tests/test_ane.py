"""Graphs for the Neural Engine: its checked list, its operators' arithmetic, and evidence in float16."""

import json
import math
from dataclasses import replace

import ane_inputs as given
import gate_inputs
import numpy as np
import pytest
import torch
from gate_inputs import INT8

from workflow_scripts import closure
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.coreai import ane_rules
from workflow_scripts.coreai.ane_check import ane_problems
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.coreai.isolated import ChildDied
from workflow_scripts.errors import UserError
from workflow_scripts.gates import fp16_evidence, runs
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.structure import content_name
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.ane_conv import DenseConv, stored_conv
from workflow_scripts.model.ane_head import AneHead, exported_head
from workflow_scripts.model.ane_layers import LARGEST, AneRMSNorm, RotaryLookup, UnitRMS
from workflow_scripts.model.ane_rows import rows_of
from workflow_scripts.model.chunks import chunk_plan, plan_json
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.norm import rms_normalize
from workflow_scripts.model.rope import RotaryEmbedding
from workflow_scripts.model.rotary_table import rotary_table
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.quantize.weights import Palette, Weights
from workflow_scripts.release.names import CHUNKS_PLAN


@pytest.fixture(scope="module")
def weights(tiny_weights):
    return Weights.open(tiny_weights[INT8])


@pytest.fixture(scope="module")
def shipped_head(run_stage, tiny_weights):
    return given.head(run_stage, tiny_weights[INT8], "fp16")


def test_a_shipped_chunk_keeps_to_the_checked_list(run_stage, tiny_weights):
    assert ane_problems(given.chunk(run_stage, tiny_weights[INT8], "fp16", 1)) == []


def test_a_float32_twin_breaks_no_rule_but_the_type(run_stage, tiny_weights):
    """It has the very operators of the shipped chunk."""
    problems = ane_problems(given.chunk(run_stage, tiny_weights["fp32"], "fp32", 1))
    assert problems
    assert all("constant of f32" in text or "cast inside" in text for text in problems)


def test_the_other_argmax_head_is_not_for_the_engine(run_stage, tiny_weights, shipped_head, tmp_path):
    """Why there is a head of its own; at the real vocabulary its sizes break rules too. By the gate `ane`."""
    other = gate_inputs.head(run_stage, tiny_weights[INT8])
    failed = gate_inputs.judge("gate_ane", {"bundle": other}, tmp_path / "other")
    (found,) = failed.values()
    assert "matmul by stored weights" in found and ";" not in found
    assert gate_inputs.judge("gate_ane", {"bundle": shipped_head}, tmp_path / "shipped") == {}


class Wrong(torch.nn.Module):
    """Every rule broken once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(8, 8, dtype=torch.float16).cumsum(0))
        self.register_buffer("minus_infinity", torch.tensor([0, -math.inf], dtype=torch.float16))
        self.register_buffer("wide", torch.arange(8, dtype=torch.float32))

    def forward(self, x, y, ids, long):
        attention = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x, scale=1.0)
        return (
            torch.nn.functional.linear(x, self.weight),
            attention,
            torch.cat([x, y[:, :1]], 1),
            torch.sin(x),
            (x.float() * self.wide).half() + 1,
            x[..., :2] + self.minus_infinity,
            (ids * 2).half() + x,
            x.reshape(2, 2, 2, 2, 2, 2) + 1,
            long.argmax(-1).to(torch.int32),
            torch.index_select(x.reshape(8, 8), 0, ids),
            long[..., :1] * torch.ones(1, 1, 70000, 1, dtype=torch.float16),
        )


EXPECTED = [
    "matmul by stored weights",
    "composite scaled_dot_product_attention: wrong",
    "concat of inputs: wrong",
    "main: sin: ",
    "constant of f32",
    "cast inside: mul gives f32",
    "infinite constant",
    "integer inside: mul gives si32",
    "rank of 6, at most 5",
    "argmax axis of 4096, at most 2048",
    "gather",
    "width or height of 70000",
    "axis of 70000",
]


def test_every_broken_rule_is_named_with_reason_and_source(tmp_path):
    half, ids = TensorSpec("float16", (1, 1, 8, 8)), TensorSpec("int32", (8,))
    inputs = {"x": half, "y": half, "ids": ids, "long": TensorSpec("float16", (1, 1, 1, 4096))}
    outputs = dict.fromkeys((f"out{number}" for number in range(11)), half)
    bundle = tmp_path / "wrong.aimodel"
    bundle.mkdir()
    save_bundle([Function("main", Wrong(), FunctionSpec(inputs, outputs))], bundle, {})
    problems = ane_problems(bundle)
    for part in EXPECTED:
        assert any(part in text for text in problems), part
    assert all(text.endswith(("]", "times)")) and " [" in text for text in problems)


def test_an_operator_that_is_not_on_the_list_is_no_pass(monkeypatch, shipped_head):
    from workflow_scripts.coreai import ane_check

    monkeypatch.delitem(ane_rules.OPERATORS, "conv2d")
    found = ane_check.find_problems(str(shipped_head))["problems"].tolist()
    assert len(found) == 1 and "main: conv2d is not on the checked list" in found[0]


def test_a_damaged_bundle_ends_the_child_alone(shipped_head, tmp_path):
    data = (shipped_head / "main.mlirb").read_bytes()
    (tmp_path / "main.mlirb").write_bytes(data[: len(data) // 2])
    with pytest.raises(ChildDied):
        ane_problems(tmp_path)


def test_every_rule_has_a_reason_and_a_known_source():
    tables = (
        ane_rules.OPERATORS,
        ane_rules.COMPOSITES,
        ane_rules.DTYPES,
        ane_rules.PATTERNS,
        ane_rules.ASSUMED,
        ane_rules.LIMITS,
    )
    for table in tables:
        for rule in table.values():
            assert rule.reason and rule.sources
            assert {*rule.sources} <= ane_rules.SOURCES.keys()


@pytest.mark.parametrize("scale", [1e-4, 0.05, 1.0, 20.0, 1e3, 6e4])
def test_the_norm_is_the_decoders_norm(scale):
    """Also where rows are scaled, and where eps counts."""
    x = torch.from_numpy(np.random.default_rng(0).normal(0, scale, (1, 1, 4, 96)).astype(np.float32))
    assert (x.abs().max() > LARGEST) == (scale > 40)
    found, expected = UnitRMS(96, 1e-6, torch.float32)(x), rms_normalize(x, 1e-6)
    assert (found - expected).abs().max() <= 2e-6


def test_norms_are_right_in_float16_where_the_naive_one_overflows():
    verdict = Verdict("fp16", "norms")
    fp16_evidence.gate_half_norms(verdict)
    assert [check.name for check in verdict.checks if not check.passed] == []
    assert len(verdict.checks) == 4


def slightly_wrong(x, norm=fp16_evidence.our_rms):
    return norm(x) * 1.01


@pytest.mark.parametrize(
    ("norm", "failed"),
    [
        (fp16_evidence.naive_rms, ["LayerNorm as one operator", "LayerNorm as split"]),
        (fp16_evidence.unscaled_rms, ["LayerNorm as split"]),
        (slightly_wrong, ["LayerNorm as one operator", "LayerNorm as split"]),
    ],
)
def test_the_evidence_fails_another_norm(monkeypatch, norm, failed):
    monkeypatch.setattr(fp16_evidence, "our_rms", norm)
    verdict = Verdict("fp16", "norms")
    fp16_evidence.gate_half_norms(verdict)
    found = [check.name.rpartition(", ")[2] for check in verdict.checks if not check.passed]
    assert found == failed


def test_emulated_storage_is_float16():
    """Rounds every result, overflows to infinity, and sums a product's terms in one float16 accumulator."""
    ones, storage = torch.ones(1, 1, 4096), fp16_evidence.HalfStorage()
    with storage:
        assert (torch.tensor([2049.0]) + 0).item() == 2048
        assert (torch.tensor([300.0]) ** 2).item() == math.inf
        assert (
            torch.bmm(ones, ones.transpose(1, 2)).item() == 2048
        )  # facts of the Linux runtime's accumulator
        wide = torch.nn.functional.conv2d(ones.reshape(1, 4096, 1, 1), ones.reshape(1, 4096, 1, 1))
        assert wide.item() == 4096
    assert storage.largest["pow"] == math.inf and storage.largest["convolution"] == 4096


def test_the_chain_answers_in_emulated_float16(run_stage, tiny_checkpoint, tiny_weights, tmp_path):
    """Eight of eight, with every doubtful operator at its worst: the gate `fp16` over a folder's plan."""
    oracle = gate_inputs.oracle(run_stage, tiny_checkpoint)
    plan = chunk_plan(Checkpoint.open(tiny_checkpoint).config, given.RANGES, given.CONTEXT)
    (tmp_path / CHUNKS_PLAN).write_text(json.dumps(plan_json(plan, "fp16", ["a", "b", "c"])))
    inputs = {
        "folder": tmp_path,
        "oracle": oracle,
        "weights": tiny_weights[INT8],
        "reference": gate_inputs.reference(run_stage, tiny_checkpoint, tiny_weights[INT8]),
    }
    assert gate_inputs.judge("gate_fp16", inputs, tmp_path / "out") == {}
    ids = Oracle.open(oracle).dialogues[given.DIALOGUE].output_ids
    checks = json.loads((tmp_path / "out/verdict.json").read_text())["checks"]
    found = {check["name"]: check["found"] for check in checks}
    assert found[f"{given.DIALOGUE}: ids in float16"] == str(ids) and len(ids) == 8


@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_the_looked_up_rotation_is_the_computed_one(weights, kind):
    config = weights.config
    rope, head_dim = config.rope[kind], config.layer_head_dim(config.layer_types.index(kind))
    lookup, computed = RotaryLookup(config, [kind], 64, torch.float32), RotaryEmbedding(rope, head_dim)
    stored = rotary_table(rope, head_dim, 64)
    for position in (0, 1, 7, 31, 63):
        ids = torch.tensor([[position]], dtype=torch.int32)
        found = lookup(ids, kind).numpy().reshape(2, head_dim)
        np.testing.assert_array_equal(found, stored[position])  # one product is the row, the others are zero
        expected = np.stack([part.numpy().reshape(-1) for part in computed(ids)])
        np.testing.assert_allclose(found, expected, atol=1.2e-7, rtol=0)


def test_stored_rotations_are_rounded_from_the_exact_ones(weights):
    table = rotary_table(weights.config.rope[SLIDING], 256, 3)
    angle = float(np.float32(2) * np.float32(1e4 ** (-2 / 256)))
    assert table[2, 0, 1] == np.float32(math.cos(angle)) and table[2, 1, 129] == np.float32(math.sin(angle))
    assert table[2, 1, 1] == -table[2, 1, 129] and (table[0, 0] == 1).all() and (table[0, 1] == 0).all()


def test_a_context_that_float16_cannot_count_is_refused(weights):
    with pytest.raises(UserError, match=r"context is 2049 .*exact up to 2048"):
        RotaryLookup(weights.config, [SLIDING], 2049, torch.float16)


def tiled_head(matrix, block, tile):
    """A head over rows [vocabulary, hidden] with small blocks and tiles."""
    blocks = [DenseConv(matrix[first : first + block]) for first in range(0, len(matrix), block)]
    return AneHead(blocks, tile, len(matrix), torch.float32)


@torch.no_grad()
def test_the_head_takes_the_largest_score_and_of_equal_ones_the_lowest_id():
    numbers = np.random.default_rng(0)
    for block, tile in ((64, 64), (64, 16), (16, 16), (32, 8)):
        # Whole numbers of a small range: most rows of scores have ties, within a tile and between tiles.
        matrix = torch.from_numpy(numbers.integers(-1, 2, (64, 6)).astype(np.float32))
        head = tiled_head(matrix, block, tile)
        for _ in range(50):
            hidden = torch.from_numpy(numbers.integers(-2, 3, (1, 1, 6)).astype(np.float32))
            found = head(hidden)
            assert found.dtype == torch.int32 and found.shape == (1, 1)
            assert found.item() == (hidden[0, 0] @ matrix.T).numpy().argmax()


def test_the_real_head_is_cut_into_what_the_engine_takes(weights):
    """By the sizes alone: 262144 rows are 16 convolutions and 128 tiles."""
    assert math.gcd(262144, 16384) == 16384 and 262144 // 2048 == 128
    matrix = weights.linear(HEAD_WEIGHT)
    assert isinstance(matrix, Palette)
    middle = rows_of(matrix, 64, 192)
    np.testing.assert_array_equal(middle.dequantize(), matrix.dequantize(slice(64, 192)))
    layer = stored_conv(middle, torch.float16)
    assert layer.indices.shape == (128, 96, 1, 1) and layer.lut.shape == (4, 1, 1, 1, 256, 1)
    odd = replace(weights, config=replace(weights.config, vocab_size=1000))
    with pytest.raises(UserError, match="vocab_size is 1000"):
        exported_head(odd, torch.float16)


def test_the_exported_head_chooses_as_numpy_does(shipped_head, weights, tmp_path):
    hidden = np.random.default_rng(1).normal(size=(6, weights.config.hidden_size)).astype(np.float32)
    np.savez(tmp_path / "arrays.npz", **{"some.hidden": hidden})
    found = runs.run_head(str(shipped_head), str(tmp_path / "arrays.npz"), ["some"])["some"].reshape(-1)
    scores = hidden.astype(np.float16).astype(np.float32) @ weights.linear(HEAD_WEIGHT).dequantize().T
    top = np.sort(scores, 1)
    clear = top[:, -1] - top[:, -2] > 0.05
    assert clear.sum() >= 3
    assert (found == scores.argmax(1))[clear].all()


def test_the_bundles_hold_their_recipes_weights_and_nothing_else(
    run_stage, tiny_checkpoint, tiny_weights, shipped_head, tmp_path
):
    """The gate `structure`; a chunk of other layers is found."""
    chunk = given.chunk(run_stage, tiny_weights[INT8], "fp16", 1)
    for name, bundle, params in (
        ("head", shipped_head, {"form": "ane_head"}),
        ("chunk", chunk, {"form": "ane_chunk", "layers": [3, 5]}),
        ("other", chunk, {"form": "ane_chunk", "layers": [2, 4]}),
    ):
        inputs = {"bundle": bundle, "checkpoint": tiny_checkpoint, "weights": tiny_weights[INT8]}
        failed = gate_inputs.judge(
            "gate_structure_ane", inputs, tmp_path / name, compute="fp16", context=64, **params
        )
        if name != "other":
            assert failed == {}
        else:
            assert any("weights stored as the recipe says" in check for check in failed)
            assert {"says its layers", "constants beside the weights"} <= failed.keys()


class Wide(torch.nn.Module):
    """A norm, a rotation and a convolution at E2B's widths."""

    def __init__(self, config):
        super().__init__()
        numbers = np.random.default_rng(0)
        codes = numbers.integers(0, 256, (64, 1536), np.uint8)
        book = np.sort(numbers.normal(0, 0.02, (2, 256)).astype(np.float16), 1)
        self.norm = AneRMSNorm(torch.from_numpy(numbers.normal(1, 0.1, 1536).astype(np.float16)), 1e-6)
        self.conv = stored_conv(Palette(codes, book, 32, 8), torch.float16)
        self.rotary = RotaryLookup(config, [FULL], 64, torch.float16)

    def forward(self, x, position):
        return self.conv(self.norm(x).reshape(1, -1, 1, 1)), self.rotary(position, FULL)


def test_no_constant_escapes_content_naming_at_the_real_widths(tmp_path, weights):
    """Constants under 256 elements would hide it: then the bytes change from run to run."""
    inputs = {"x": TensorSpec("float16", (1, 1, 1, 1536)), "position": TensorSpec("int32", (1, 1))}
    outputs = {"y": TensorSpec("float16", (1, 64, 1, 1)), "z": TensorSpec("float16", (1, 2, 1, 512))}
    bundle = tmp_path / "wide.aimodel"
    bundle.mkdir()
    config = replace(weights.config, global_head_dim=512)
    save_bundle([Function("main", Wide(config), FunctionSpec(inputs, outputs))], bundle, {})
    data, constants = (bundle / "main.mlirb").read_bytes(), read_constants(bundle / "main.mlirb")
    assert len(constants) == 4  # norm, codes, codebook, rotations
    for constant in constants:
        assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name
    assert ane_problems(bundle) == []


def test_linear_codes_are_refused():
    with pytest.raises(UserError, match="linear codes, which do not compile"):
        stored_conv(object(), torch.float16)


def sources(stage):
    return {path.relative_to(closure.PACKAGE).as_posix() for path in closure.stage_sources(stage)}


def test_the_two_authorings_rebuild_nothing_of_each_other():
    """Only what is data or arithmetic of both is shared."""
    shared = {"model/__init__.py", "model/signature.py", "model/frequencies.py", "model/names.py"}
    ours = {name for stage in ("export_ane_chunk", "export_ane_head") for name in sources(stage)}
    assert {"model/ane_layers.py", "model/ane_chunk.py", "model/ane_head.py"} <= ours
    theirs = {
        name
        for stage in closure.PACKAGE.glob("stages/export_*.py")
        if "ane" not in stage.stem
        for name in sources(stage.stem)
    }
    for stage in ("export_ane_chunk", "export_ane_head"):
        assert {name for name in sources(stage) & theirs if name.startswith("model/")} <= shared
    assert not {name for name in theirs if "ane" in name or "chunk" in name or "rotary" in name}
    assert not {name for name in ours if name.startswith(("gates/", "coreai/ane", "kernels/"))}
    everywhere = {stage.stem: sources(stage.stem) for stage in closure.PACKAGE.glob("stages/[eg]*_*.py")}
    assert {stage for stage, names in everywhere.items() if "model/ane_layers.py" in names} == {
        *("export_ane_chunk", "gate_fp16")
    }
    assert {stage for stage, names in everywhere.items() if "model/ane_head.py" in names} == {
        "export_ane_head"
    }
    assert "model/ane_head.py" not in sources("export_ane_chunk")
    assert "model/ane_chunk.py" not in sources("export_ane_head")
