"""The decoder in chunks is the decoder in one graph, in torch and in the runtime, and what goes wrong shows."""

import json
from dataclasses import replace
from itertools import pairwise

import ane_inputs as given
import gate_inputs
import numpy as np
import pytest
import torch
from ane_inputs import CONTEXT, DIALOGUE, RANGES
from gate_inputs import INT8
from hypothesis import given as drawn
from hypothesis import settings, strategies

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.coreai.chunk_bundles import read_plan
from workflow_scripts.coreai.chunk_host import ChunkHost
from workflow_scripts.coreai.host_cache import HostCache
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError
from workflow_scripts.gates import chunks
from workflow_scripts.gates.fp16_evidence import torch_call
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model import ane_chunk
from workflow_scripts.model.chunks import chunk_plan, plan_json
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.hostcache import HostCacheCore
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.signature import hostcache_core, signature
from workflow_scripts.release.names import CHUNKS_PLAN

SAME = 1e-5  # of hidden states with values up to 12: 10 units in the last place
E2B = [(0, 8), (8, 15), (15, 20), (20, 25), (25, 30), (30, 35)]


@pytest.fixture(scope="module")
def config(tiny_checkpoint):
    return Checkpoint.open(tiny_checkpoint).config


@pytest.fixture(scope="module")
def e2b(config):
    """The plan's part of E2B's configuration."""
    return replace(
        config,
        num_hidden_layers=35,
        num_kv_shared_layers=20,
        layer_types=(*[SLIDING] * 4, FULL) * 7,
        hidden_size=1536,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        sliding_window=512,
    )


def test_the_published_chunks_come_out_of_the_configuration(e2b):
    plan = chunk_plan(e2b, E2B, 64)
    assert [(c.slots[SLIDING], c.slots[FULL]) for c in plan.chunks] == [
        ([0, 1, 2, 3, 4, 5, 6], [0]),
        ([7, 8, 9, 10, 11], [1, 2]),
        *[([], [])] * 4,
    ]
    producers = {kind: (p.layer, p.slot, p.chunk, p.index) for kind, p in plan.producers.items()}
    assert producers == {SLIDING: (13, 11, 1, 4), FULL: (14, 2, 1, 1)}
    front = ["hidden_in", "per_layer_inputs", "position_ids", "causal_mask_full", "causal_mask_sliding"]
    caches = ["sliding_k", "sliding_v", "full_k", "full_v"]
    joined = ["prod_sliding_kv_k", "prod_sliding_kv_v", "prod_full_kv_k", "prod_full_kv_v"]
    assert [c.inputs for c in plan.chunks] == [front + caches] * 2 + [front + joined] * 4
    assert [c.outputs for c in plan.chunks] == [["hidden", *(f"{n}_cur" for n in caches)]] * 2 + [
        ["hidden"]
    ] * 4
    spec = signature("ane_chunk", e2b, 64, "fp16", layers=(8, 15))["main"]
    assert spec.inputs["per_layer_inputs"].shape == (1, 1, 7, 256)
    assert spec.inputs["sliding_k"].shape == (5, 1, 1, 64, 256)
    assert spec.outputs["full_v_cur"].shape == (2, 1, 1, 1, 512)
    last = signature("ane_chunk", e2b, 64, "fp16", layers=(30, 35))["main"]
    assert last.inputs["prod_full_kv_v"].shape == (1, 1, 65, 512)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], r"layers \[0, 10\) are in no chunk"),
        ([(1, 10)], r"layers \[0, 1\) are in no chunk"),
        ([(0, 3), (3, 5)], r"layers \[5, 10\) are in no chunk"),
        ([(0, 3), (4, 10)], r"chunk 2 .*reads the K/V that layer 3 makes"),
        ([(0, 2), (3, 10)], r"layers \[2, 3\) are in no chunk"),
        ([(0, 5), (4, 10)], "starts at layer 4 though the one before it ends with 4"),
        ([(0, 11)], "ends with layer 10, but the model's last layer is 9"),
        ([(0, 5), (5, 5), (5, 10)], r"\[5, 5\] is no range"),
        ([(0, 10, 1)], r"\[0, 10, 1\] is no range"),
        ([(-1, 10)], r"\[-1, 10\] is no range"),
        ([(0, 3), (5, 10), (3, 5)], r"chunk 2 \(layers \[5, 10\)\) reads the K/V that layer 3 makes"),
        ([(4, 10), (0, 4)], r"chunk 1 \(layers \[4, 10\)\) reads the K/V that layer 3 makes"),
    ],
)
def test_ranges_that_are_no_decoder_are_refused(config, ranges, message):
    with pytest.raises(UserError, match=message):
        chunk_plan(config, ranges, 64)


@settings(max_examples=30)
@drawn(strategies.sets(strategies.integers(1, 34)))
def test_any_cut_in_order_is_a_whole_decoder(e2b, cuts):
    """Every slot has one owner; every input that is another chunk's is one of an earlier chunk, and there."""
    ranges = list(pairwise([0, *sorted(cuts), 35]))
    plan = plan_json(chunk_plan(e2b, ranges, 64), "fp16", [""] * len(ranges))
    written = [
        (t["target"]["cache"], slot)
        for c in plan["chunks"]
        for t in c["outputs"].values()
        for slot in t["target"].get("slots", [])
    ]
    assert sorted(written) == sorted(
        (name, slot) for name, tensor in plan["caches"].items() for slot in range(tensor["shape"][0])
    )
    for number, chunk in enumerate(plan["chunks"]):
        for tensor in chunk["inputs"].values():
            source = tensor["source"]
            if source["kind"] == "producer":
                assert source["chunk"] < number
                target = plan["chunks"][source["chunk"]]["outputs"][source["output"]]["target"]
                assert target["slots"][source["index"]] == source["slot"]
                assert target["cache"] == source["cache"]


def small_plan(config, context=12):
    return plan_json(chunk_plan(config, RANGES, context), "fp16", ["a", "b", "c"])


def test_masks_and_positions_are_those_of_a_core_in_one_graph(config):
    """Up to the bucket's end and not beyond it."""
    spec = hostcache_core(config, 12, "fp16")["main"]
    core, seen = HostCache(spec, config.sliding_window), []

    def call(number, inputs):
        seen.append(inputs)
        return {name: np.zeros(t["shape"]) for name, t in plan["chunks"][number]["outputs"].items()}

    plan = small_plan(config)
    host = ChunkHost(plan, call)
    front = np.zeros((1, 1, 96)), np.zeros((1, 1, 10, 32))
    for _ in range(12):
        expected = core.inputs()
        host.step(*front)
        for inputs in seen[-3:]:
            for name in inputs.keys() & {"causal_mask_full", "causal_mask_sliding", "position_ids"}:
                np.testing.assert_array_equal(inputs[name], expected[name])
                assert inputs[name].dtype == expected[name].dtype
        core.store({f"{name}_cur": np.zeros(spec.outputs[f"{name}_cur"].shape) for name in host.caches})
    with pytest.raises(UserError, match="longer than the 12 positions these chunks were exported for"):
        host.step(*front)


def test_a_plan_of_another_version_is_refused(config, tmp_path):
    plan = small_plan(config)
    plan["chunks"][0]["inputs"]["hidden_in"]["source"]["kind"] = "dream"
    with pytest.raises(UserError, match="source `dream`"):
        ChunkHost(plan, None).step(np.zeros((1, 1, 96)), np.zeros((1, 1, 10, 32)))
    with pytest.raises(UserError, match="is missing"):
        read_plan(tmp_path / CHUNKS_PLAN)
    for text, message in (("{", "not readable JSON"), ('{"format": 2}', "not of format 1")):
        (tmp_path / CHUNKS_PLAN).write_text(text)
        with pytest.raises(UserError, match=message):
            read_plan(tmp_path / CHUNKS_PLAN)


@pytest.fixture(scope="module")
def evidence(run_stage, tiny_checkpoint, tiny_weights):
    return given.evidence(run_stage, tiny_checkpoint, tiny_weights["fp32"])


@pytest.fixture(scope="module")
def arrays(evidence):
    with np.load(evidence.arrays) as stored:
        return dict(stored)


def drive(host, arrays):
    fronts = chunks._fronts(arrays, DIALOGUE, host.plan["context"])
    return np.stack([host.step(*front)[0, 0] for front in fronts])


@pytest.fixture(scope="module")
@torch.no_grad()
def whole(evidence, arrays):
    """Hidden rows of `HostCacheCore`, one position at a time."""
    config = evidence.plan.config
    core = HostCacheCore(Decoder(evidence.weights, eager_linears(evidence.weights), torch.float32)).eval()
    spec = hostcache_core(config, CONTEXT, "fp32")["main"]
    cache, rows = HostCache(spec, config.sliding_window), []
    for embeds, per_layer in chunks._fronts(arrays, DIALOGUE, CONTEXT):
        given_inputs = {"inputs_embeds": embeds, "per_layer_inputs": per_layer, **cache.inputs()}
        results = core(*(torch.from_numpy(given_inputs[name]) for name in spec.inputs))
        outputs = dict(zip(spec.outputs, (result.numpy() for result in results), strict=True))
        cache.store(outputs)
        rows.append(outputs["hidden"][0, 0])
    assert len(rows) > 2 * config.sliding_window
    return np.stack(rows)


@pytest.mark.parametrize(
    "ranges",
    [RANGES, [(0, 10)], [(0, 4), (4, 10)], [(layer, layer + 1) for layer in range(10)]],
    ids=["set", "one", "producers apart, one among its readers", "single layers"],
)
def test_a_chain_of_chunks_is_the_core_in_one_graph(evidence, arrays, whole, ranges):
    plan = chunk_plan(evidence.plan.config, ranges, CONTEXT)
    host = ChunkHost(plan_json(plan, "fp32", [""] * len(ranges)), torch_call(plan, evidence.weights))
    assert np.abs(drive(host, arrays) - whole).max() <= SAME


@pytest.fixture(scope="module")
def exported(run_stage, tiny_weights):
    """The plan of float32 chunks, beside them."""
    return given.chunk_set(run_stage, tiny_weights["fp32"], "fp32")


def test_exported_chunks_are_the_core_in_one_graph(exported, evidence, whole):
    rows = isolated(
        chunks.run_chain, plan_path=str(exported), arrays=str(evidence.arrays), dialogues=[DIALOGUE]
    )
    assert np.abs(rows[DIALOGUE] - whole).max() <= SAME


def failures(verdict):
    return [check.name for check in verdict.checks if not check.passed]


@pytest.mark.parametrize(("recipe", "compute"), [("fp32", "fp32"), (INT8, "fp16")])
def test_the_gate_passes_a_sound_chunk(run_stage, tiny_checkpoint, tiny_weights, recipe, compute):
    """The one with both producers, as evidence and as it is shipped; a chunk of other weights fails."""
    bundle = given.chunk(run_stage, tiny_weights[recipe], compute, 1)
    for judged, failed in ((recipe, []), ({"fp32": INT8, INT8: "fp32"}[recipe], ["hidden", "full_v_cur"])):
        if judged == "fp32" and compute == "fp16":
            continue  # palettes of 8 bit are nearer to the checkpoint than float16 rounding allows for
        verdict = Verdict("chunks", bundle.name)
        evidence = given.evidence(run_stage, tiny_checkpoint, tiny_weights[judged])
        chunks.gate_chunk(verdict, bundle, evidence, 1, compute)
        names = [f"{DIALOGUE}: {name}" for name in evidence.plan.chunks[1].outputs]
        assert [check.name for check in verdict.checks] == names
        assert {f"{DIALOGUE}: {name}" for name in failed} <= {*failures(verdict)}
        assert failed or not failures(verdict)


class MaskShifted(ChunkHost):
    def _mask(self, tensor):
        return np.roll(super()._mask(tensor), 1, -1)


class PastShifted(ChunkHost):
    def _mask(self, tensor):
        mask, context = super()._mask(tensor), self.plan["context"]
        mask[..., :context] = np.roll(mask[..., :context], 1, -1)
        return mask


class WrittenLate(ChunkHost):
    def _store(self, made):
        self.position += 1
        super()._store(made)
        self.position -= 1


class CurrentFirst(ChunkHost):
    def _given(self, tensor, *others):
        value = super()._given(tensor, *others)
        return np.roll(value, 1, 2) if tensor["source"]["kind"] == "producer" else value


def swapped(plan, kind):
    """The last chunk gets keys for values."""
    inputs = plan["chunks"][-1]["inputs"]
    key, value = inputs[f"prod_{kind}_kv_k"], inputs[f"prod_{kind}_kv_v"]
    key["source"], value["source"] = value["source"], key["source"]


def wrong_slot(plan):
    for part in "kv":
        plan["chunks"][-1]["inputs"][f"prod_sliding_kv_{part}"]["source"]["slot"] -= 1


def wider_window(plan):
    for chunk in plan["chunks"]:
        chunk["inputs"]["causal_mask_sliding"]["source"]["window"] += 1


def unchanged(plan):
    pass


FAULTS = {
    "mask shifted by a column": (MaskShifted, unchanged),
    "past columns of the mask shifted by one": (PastShifted, unchanged),
    "K/V written one column late": (WrittenLate, unchanged),
    "producer's current column first": (CurrentFirst, unchanged),
    "sliding producer's keys for values": (ChunkHost, lambda plan: swapped(plan, "sliding")),
    "full producer's keys for values": (ChunkHost, lambda plan: swapped(plan, "full")),
    "history of another slot": (ChunkHost, wrong_slot),
    "window wider by one": (ChunkHost, wider_window),
}


@pytest.fixture(scope="module")
def modules(evidence):
    """The chunks in torch; they hold no state."""
    return torch_call(evidence.plan, evidence.weights)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_host_shows_beyond_the_widest_bound(evidence, arrays, whole, modules, fault):
    """Ten times the bound of the whole float16 chain, which is the widest of all."""
    host, change = FAULTS[fault]
    plan = plan_json(evidence.plan, "fp32", [""] * len(RANGES))
    change(plan)
    found = drive(host(plan, modules), arrays)
    verdict = Verdict("chunks", "chain")
    bound = 10 * chunks.row_bound(evidence, (0, evidence.plan.config.num_hidden_layers), "fp16")
    chunks.compare_rows(verdict, "rows", whole, whole, bound)
    assert failures(verdict) == []
    chunks.compare_rows(verdict, "rows", found, whole, bound)
    assert failures(verdict) == ["rows"] and "at position" in verdict.checks[-1].found


def test_a_skipped_final_norm_shows(evidence, arrays):
    """The residual itself, in place of the last chunk's hidden state."""
    verdict = Verdict("chunks", "chunk")
    bound = chunks.row_bound(evidence, RANGES[-1], "fp16")
    found, expected = arrays[f"{DIALOGUE}.residual.10"], arrays[f"{DIALOGUE}.hidden"]
    chunks.compare_rows(verdict, "hidden", found, expected, bound)
    assert failures(verdict) == ["hidden"]


@pytest.fixture(scope="module")
def judge_set(run_stage, exported, tiny_checkpoint, tiny_weights):
    """Run the gate `chunks` over a folder; gives its failed checks."""
    inputs = {
        "oracle": gate_inputs.oracle(run_stage, tiny_checkpoint),
        "weights": tiny_weights["fp32"],
        "reference": gate_inputs.reference(run_stage, tiny_checkpoint, tiny_weights["fp32"]),
    }
    names = [chunk["bundle"] for chunk in read_plan(exported)["chunks"]]
    params = {"bundles": names, "layers": RANGES, "compute": "fp32", "context": CONTEXT}

    def run(folder, out):
        return gate_inputs.judge("gate_chunks", inputs | {"folder": folder}, out, **params)

    return run


def test_the_gate_passes_a_sound_set(judge_set, exported, tmp_path):
    assert judge_set(exported.parent, tmp_path / "out") == {}


CHAIN = f"{DIALOGUE}: hidden state of the chain"


def test_the_gate_finds_a_producers_keys_and_values_in_the_wrong_order(judge_set, exported, tmp_path):
    """A wrong plan beside sound chunks."""
    folder, plan = tmp_path / "folder", read_plan(exported)
    folder.mkdir()
    for chunk in plan["chunks"]:
        (folder / chunk["bundle"]).symlink_to(exported.parent / chunk["bundle"])
    swapped(plan, "full")
    (folder / CHUNKS_PLAN).write_text(json.dumps(plan))
    failed = judge_set(folder, tmp_path / "out")
    assert failed.keys() == {"plan of the chunks", CHAIN}
    assert failed["plan of the chunks"].startswith("another at chunks.2.inputs.prod_full_kv_k.source.")


@pytest.mark.parametrize("host", [MaskShifted, WrittenLate])
def test_the_gate_finds_a_wrong_host(judge_set, exported, tmp_path, monkeypatch, host):
    monkeypatch.setattr(chunks, "ChunkHost", host)
    monkeypatch.setattr(chunks, "isolated", lambda function, **arguments: function(**arguments))
    assert judge_set(exported.parent, tmp_path / "out").keys() == {CHAIN}


def test_the_gate_finds_a_skipped_final_norm(run_stage, tiny_checkpoint, tiny_weights, tmp_path, monkeypatch):
    """Gate `numbers` over the last layer by itself."""
    weights, params = tiny_weights["fp32"], {"compute": "fp32", "context": CONTEXT, "layers": [9, 10]}
    monkeypatch.setattr(ane_chunk, "_final_norm", lambda weights, dtype: torch.nn.Identity())
    bundle = run_stage("export_ane_chunk", "unnormed.aimodel", {"weights": manifest_path(weights)}, **params)
    inputs = {
        "bundle": bundle,
        "oracle": gate_inputs.oracle(run_stage, tiny_checkpoint),
        "weights": weights,
        "reference": gate_inputs.reference(run_stage, tiny_checkpoint, weights),
    }
    failed = gate_inputs.judge("gate_numbers_ane", inputs, tmp_path / "out", **params)
    assert failed.keys() == {f"{DIALOGUE}: hidden"}


@pytest.mark.parametrize(
    ("layers", "ranges"),
    [
        ((0, 10), [(0, 10)]),
        ((0, 3), [(0, 3), (3, 10)]),
        ((3, 5), [(0, 3), (3, 5), (5, 10)]),
        ((9, 10), [(0, 9), (9, 10)]),
    ],
)
def test_a_chunk_is_judged_without_the_others_of_its_set(config, layers, ranges):
    plan, number = chunks.plan_around(config, layers, CONTEXT)
    assert [chunk.layers for chunk in plan.chunks] == ranges and ranges[number] == layers


def test_nan_and_missing_rows_never_pass():
    verdict = Verdict("chunks", "chunk")
    rows = np.ones((3, 4), np.float32)
    for found in (np.where(rows, np.nan, 0), rows[:2], rows[:0]):
        chunks.compare_rows(verdict, "rows", found, rows if len(found) else found, 1.0)
    assert len(failures(verdict)) == 3
