"""Forms `decode`, `decode_tbl` and `decode_ring`: whole models with states, in torch and in the Core AI runtime."""

import numpy as np
import pytest
import torch
from state_models import (
    CACHE_MINIMUM,
    CAPACITIES,
    CONTEXT,
    SMALL,
    TorchProgram,
    described,
    export,
    model,
    small_artifacts,
)

from tests import tiny
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.decode_host import DecodeHost, RingHost, token_rows, whole_table
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.structure import content_name
from workflow_scripts.model.decode import Decode, DecodeTable
from workflow_scripts.model.decode_ring import DecodeRing
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.signature import signature
from workflow_scripts.model.token_decoder import token_decoder
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages import export_decode, export_decode_ring, export_decode_tbl
from workflow_scripts.tables.raw import RawTables

FORMS = ("decode", "decode_tbl", "decode_ring")
COMPUTE = {"decode": "fp32", "decode_tbl": "fp16", "decode_ring": "fp32"}
STAGES = {"decode": export_decode, "decode_tbl": export_decode_tbl, "decode_ring": export_decode_ring}
# A matmul of the Linux runtime adds in float16. Measured on a random model: the largest error of 60 rows is 0.33 (in
# torch's float16 0.11), and two unrelated rows differ by 4.
FP16_LOGITS = 0.7


def context(form):
    return CAPACITIES[-1] if form == "decode_ring" else CONTEXT


def options(form):
    return {"capacities": list(CAPACITIES)} if form == "decode_ring" else {"cache_minimum": CACHE_MINIMUM}


def host(form, program, tables):
    """A new conversation; the caches of `decode` and `decode_tbl` start with 32 columns and are doubled once."""
    if form == "decode_ring":
        return RingHost(program, whole_table(program, tables))
    inputs = token_rows if form == "decode" else whole_table
    return DecodeHost(program, inputs(program, tables), CONTEXT, CACHE_MINIMUM)


def run(conversation, ids):
    return np.stack([conversation.step(int(token)) for token in ids])


def torch_program(form, weights, tables):
    decoder = token_decoder(weights, tables, eager_linears(weights), torch.float32).eval()
    specs = signature(form, weights.config, context(form), "fp32", **options(form))
    if form == "decode_ring":
        rings = [DecodeRing(decoder, capacity) for capacity in CAPACITIES]
        return TorchProgram(dict(zip(specs, rings, strict=True)), specs)
    module = Decode(decoder) if form == "decode" else DecodeTable(decoder)
    return TorchProgram({"main": module}, specs)


@pytest.fixture(scope="module")
def embedded(tiny_weights, tiny_tables):
    return model(Weights.open(tiny_weights["fp32"]), RawTables.open(tiny_tables))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return small_artifacts(tmp_path_factory.mktemp("small"), "int4-linear-b32")


@pytest.fixture(scope="module")
def small(artifacts):
    """The small model; its reference has the values of the codes, the bundles have the codes."""
    return model(Weights.open(artifacts["weights"]), RawTables.open(artifacts["tables"]))


@pytest.fixture(scope="module", params=FORMS)
def bundle(request, artifacts, tmp_path_factory):
    """(form, bundle of the small model), as its stage writes it."""
    form = request.param
    out = tmp_path_factory.mktemp("bundles") / f"{form}.aimodel"
    params = {"compute": COMPUTE[form], "context": context(form), **options(form)}
    export(STAGES[form], artifacts, params, out)
    return form, out


@pytest.mark.parametrize("form", FORMS)
def test_token_by_token_equals_one_pass_of_the_reference(form, embedded):
    """Far past twice the window, and over a change of the caches' size."""
    program = torch_program(form, embedded.weights, embedded.tables)
    found = run(host(form, program, embedded.tables), embedded.ids)
    assert np.abs(found - embedded.logits).max() <= FP32_LOGITS


def test_the_runtime_computes_the_same(bundle, small):
    """Two conversations at once, each with states of its own."""
    form, path = bundle
    with open_bundle(path) as program:
        first, second = (host(form, program, small.tables) for _ in range(2))
        found = [run(first, small.ids[:5]), run(second, small.ids[:3]), run(first, small.ids[5:])]
    bound = FP32_LOGITS if COMPUTE[form] == "fp32" else FP16_LOGITS
    assert np.abs(np.concatenate(found[::2]) - small.logits).max() <= bound
    assert np.abs(found[1] - small.logits[:3]).max() <= bound


def test_the_bundle_has_the_signature(bundle, small):
    form, path = bundle
    expected = signature(form, small.weights.config, context(form), COMPUTE[form], **options(form))
    with open_bundle(path) as program:
        assert program.functions == sorted(expected)
        for name, spec in expected.items():
            assert described(program.spec(name)) == described(spec)


def test_constants_are_named_by_content_and_stored_once(bundle):
    """The functions of several capacities share their weights."""
    _, path = bundle
    data, constants = (path / "main.mlirb").read_bytes(), read_constants(path / "main.mlirb")
    names = [constant.name for constant in constants]
    assert len(set(names)) == len(names)
    for constant in constants:
        assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name


@pytest.mark.parametrize(("form", "longest"), [("decode", 63), ("decode_tbl", 63), ("decode_ring", 300)])
def test_past_the_last_position_is_a_clear_error(form, longest, small):
    conversation = host(form, torch_program(form, small.weights, small.tables), small.tables)
    run(conversation, np.zeros(longest, int))
    with pytest.raises(UserError, match=f"longer than the {longest} positions"):
        conversation.step(0)


def test_states_must_be_given(bundle, small):
    _, path = bundle
    with open_bundle(path) as program:
        function = program.functions[0]
        inputs = {
            name: np.zeros(tensor.sized(2), tensor.dtype)
            for name, tensor in program.spec(function).inputs.items()
        }
        with pytest.raises(UserError, match=r"has the states .*Cache"):
            program.call(function, inputs)


def test_unified_caches_are_padded_with_zeros(small):
    """Sliding slots first; what is behind a narrower head stays zero."""
    config = small.weights.config
    conversation = host("decode", torch_program("decode", small.weights, small.tables), small.tables)
    run(conversation, small.ids[:5])
    for array in conversation.states.arrays.values():
        cache = array.numpy()
        assert cache.shape == (3, 1, 1, CACHE_MINIMUM, config.global_head_dim)
        assert not cache[:2, ..., config.head_dim :].any()
        assert cache[:2, ..., :5, : config.head_dim].all() and cache[2, ..., :5, :].all()
        assert not cache[..., 5:, :].any()


@pytest.mark.parametrize(
    ("form", "longest", "wrong", "message"),
    [
        ("decode", 64, {"cache_minimum": 64}, "cache_minimum is 64 .* below the context 64"),
        ("decode_tbl", 64, {"cache_minimum": 2}, "cache_minimum is 2 .* 4 or more"),
        ("decode", 1024, {"cache_minimum": 32}, "max_position_embeddings is 512"),
        ("decode_ring", 64, {"capacities": [64, 32]}, "must ascend, and end with the context 64"),
        ("decode_ring", 64, {"capacities": [32]}, "must ascend, and end with the context 64"),
    ],
)
def test_lengths_that_cannot_be_are_refused(form, longest, wrong, message):
    with pytest.raises(UserError, match=message):
        signature(form, tiny.canonical_config(SMALL), longest, "fp32", **wrong)


def test_weights_and_tables_of_two_models_are_refused(small, embedded):
    with pytest.raises(UserError, match="build both from one checkpoint"):
        token_decoder(small.weights, embedded.tables, eager_linears(small.weights), torch.float32)
