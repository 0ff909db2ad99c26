"""Forms `decode`, `decode_tbl` and `decode_ring`: whole models with states, in torch and in the Core AI runtime."""

from dataclasses import replace

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
from tests.qat_checkpoint import build_qat
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.decode_host import (
    DecodeHost,
    RingHost,
    token_rows,
    whole_table,
)
from workflow_scripts.coreai.pairing import refuse_other_tables
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.structure import content_name
from workflow_scripts.model.decode import Decode, DecodeTable
from workflow_scripts.model.decode_ring import DecodeRing
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.signature import signature
from workflow_scripts.model.token_decoder import token_decoder
from workflow_scripts.quantize.recipes import get_recipe
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.quantize.writer import write_weights
from workflow_scripts.stages import export_decode, export_decode_ring, export_decode_tbl
from workflow_scripts.tables.int4_writer import write_int4_tables
from workflow_scripts.tables.open import open_tables

FORMS = ("decode", "decode_tbl", "decode_ring")
LAYOUTS = ("int8", "int4-b32")
COMPUTE = {"decode": "fp32", "decode_tbl": "fp16", "decode_ring": "fp32"}
TABLES = {"decode": "int4-b32", "decode_tbl": "int4-b32", "decode_ring": "int8"}  # of the bundles
STAGES = {"decode": export_decode, "decode_tbl": export_decode_tbl, "decode_ring": export_decode_ring}
# A matmul of the Linux runtime adds in float16. Measured on a random model: the largest error of 60 rows is 0.33 (in
# torch's float16 0.11), and two unrelated rows differ by 4.
FP16_LOGITS = 0.7


def context(form):
    return CAPACITIES[-1] if form == "decode_ring" else CONTEXT


def sizes(form):
    return {"capacities": list(CAPACITIES)} if form == "decode_ring" else {"cache_minimum": CACHE_MINIMUM}


def interface(form, given, compute):
    return signature(
        form, given.weights.config, context(form), compute, **sizes(form), tables=given.tables.FORMAT
    )


def host(form, program, tables):
    """A new conversation; the caches of `decode` and `decode_tbl` start with 32 columns and are doubled once."""
    if form == "decode_ring":
        return RingHost(program, whole_table(program, tables))
    inputs = token_rows if form == "decode" else whole_table
    return DecodeHost(program, inputs(program, tables), CONTEXT, CACHE_MINIMUM)


def run(conversation, ids):
    return np.stack([conversation.step(int(token)) for token in ids])


def torch_program(form, given):
    linears = eager_linears(given.weights)
    decoder = token_decoder(given.weights, given.tables, linears, torch.float32).eval()
    specs = interface(form, given, "fp32")
    if form == "decode_ring":
        rings = [DecodeRing(decoder, capacity) for capacity in CAPACITIES]
        return TorchProgram(dict(zip(specs, rings, strict=True)), specs)
    module = Decode(decoder) if form == "decode" else DecodeTable(decoder)
    return TorchProgram({"main": module}, specs)


@pytest.fixture(scope="module")
def embedded(tiny_weights, tiny_tables):
    return model(Weights.open(tiny_weights["fp32"]), open_tables(tiny_tables))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Of the small model, by layout of the tables: in int4 those of its twin on 4-bit grids."""
    root = tmp_path_factory.mktemp("small")
    folders = {name: root / "qat" / name for name in ("weights", "tables")}
    int8 = small_artifacts(root / "int8", "int4-linear-b32")
    checkpoint = build_qat(root / "int8" / "published", root / "qat")
    for folder in folders.values():
        folder.mkdir()
    write_weights(checkpoint, get_recipe("int4-qat-b32"), folders["weights"])
    write_int4_tables(checkpoint, folders["tables"])
    return {"int8": int8, "int4-b32": folders}


@pytest.fixture(scope="module")
def models(artifacts):
    """By layout of the tables; the reference has the values of the codes, the bundles have the codes."""
    return {
        layout: model(Weights.open(folders["weights"]), open_tables(folders["tables"]))
        for layout, folders in artifacts.items()
    }


@pytest.fixture(scope="module", params=FORMS)
def bundle(request, artifacts, tmp_path_factory):
    """(form, bundle of the small model), as its stage writes it."""
    form = request.param
    out = tmp_path_factory.mktemp("bundles") / f"{form}.aimodel"
    params = {"compute": COMPUTE[form], "context": context(form), **sizes(form)}
    export(STAGES[form], artifacts[TABLES[form]], params, out)
    return form, out


@pytest.fixture(scope="module")
def small(models, bundle):
    """What the bundle is made of."""
    return models[TABLES[bundle[0]]]


@pytest.mark.parametrize("form", FORMS)
def test_token_by_token_equals_one_pass_of_the_reference(form, embedded):
    """Far past twice the window, and over a change of the caches' size."""
    found = run(host(form, torch_program(form, embedded), embedded.tables), embedded.ids)
    assert np.abs(found - embedded.logits).max() <= FP32_LOGITS


@pytest.mark.parametrize("form", FORMS)
def test_tables_in_int4_give_the_same_as_their_reader(form, models):
    """The reference takes its embeddings and per-layer inputs from the reader, in numpy."""
    given = models["int4-b32"]
    found = run(host(form, torch_program(form, given), given.tables), given.ids)
    assert np.abs(found - given.logits).max() <= FP32_LOGITS


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
    expected = interface(form, small, COMPUTE[form])
    with open_bundle(path) as program:
        assert program.functions == sorted(expected)
        for name, spec in expected.items():
            assert described(program.spec(name)) == described(spec)


def test_constants_are_named_by_content_and_stored_once(bundle):
    """Functions of several capacities share their weights; in float16 also embedding and tied head their steps."""
    _, path = bundle
    data, constants = (path / "main.mlirb").read_bytes(), read_constants(path / "main.mlirb")
    names = [constant.name for constant in constants]
    assert len(set(names)) == len(names)
    for constant in constants:
        assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name


@pytest.mark.parametrize(("form", "longest"), [("decode", 63), ("decode_tbl", 63), ("decode_ring", 300)])
def test_past_the_last_position_is_a_clear_error(form, longest, models):
    given = models["int8"]
    conversation = host(form, torch_program(form, given), given.tables)
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


def test_unified_caches_are_padded_with_zeros(models):
    """Sliding slots first; what is behind a narrower head stays zero."""
    given = models["int8"]
    config = given.weights.config
    conversation = host("decode", torch_program("decode", given), given.tables)
    run(conversation, given.ids[:5])
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_tables_of_two_checkpoints_are_refused(layout, models):
    """Also where both are of one size."""
    weights = models["int8" if layout == "int4-b32" else "int4-b32"].weights
    with pytest.raises(UserError, match=r"tables of [0-9a-f]{12}: build both from one checkpoint"):
        token_decoder(weights, models[layout].tables, eager_linears(weights), torch.float32)


def test_a_layout_of_tables_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="no layout `int3` of raw tables: it is one of int8, int4-b32"):
        signature("decode_tbl", tiny.canonical_config(SMALL), 64, "fp32", cache_minimum=32, tables="int3")


def test_a_host_refuses_a_table_that_the_program_does_not_take(models, embedded):
    """Of another layout, and of another size."""
    program = torch_program("decode_tbl", models["int8"])
    message = r"ple_table uint8 \[128, 64\], the decoder takes int8 \[128, 128\]"
    with pytest.raises(UserError, match=message):
        whole_table(program, models["int4-b32"].tables)
    message = r"ple_table int8 \[1024, 320\], the decoder takes int8 \[128, 128\]"
    with pytest.raises(UserError, match=message):
        whole_table(program, embedded.tables)


def test_a_bundle_says_whose_tables_it_takes(bundle, models, small):
    form, path = bundle
    refuse_other_tables(path, small.tables)
    (other,) = (found.tables for layout, found in models.items() if layout != TABLES[form])
    with pytest.raises(UserError, match=r"is of checkpoint [0-9a-f]{12}, its tables are of [0-9a-f]{12}"):
        refuse_other_tables(path, other)
    same = replace(other, meta=small.tables.meta)  # of the same checkpoint, in the other layout
    with pytest.raises(UserError, match=f"made for tables in {TABLES[form]}, those at hand"):
        refuse_other_tables(path, same)
