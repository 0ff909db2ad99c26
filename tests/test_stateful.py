"""Forms `stateful_core`, `ring_core` and `blend_core`: cores whose K/V are states, in torch and in the runtime."""

import numpy as np
import pytest
import torch
from state_models import (
    CACHE_MINIMUM,
    CONTEXT,
    POSITIONS,
    TorchProgram,
    described,
    export,
    model,
    small_artifacts,
)

from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.coreai.decode_host import BlendHost, CoreHost
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.structure import content_name
from workflow_scripts.model.blend_core import BlendCore
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.kv_state import Ring, chosen_column
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.ring_core import RingCore
from workflow_scripts.model.signature import FunctionSpec, TensorSpec, signature
from workflow_scripts.model.stateful_core import StatefulCore
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages import export_blend_core, export_ring_core, export_stateful_core
from workflow_scripts.tables.raw import RawTables

FORMS = ("stateful_core", "ring_core", "blend_core")
STAGES = {
    "stateful_core": export_stateful_core,
    "ring_core": export_ring_core,
    "blend_core": export_blend_core,
}
ONE_BY_ONE = (1,) * POSITIONS
# A ring takes blocks of at most its window, 8; these also wrap in the middle of a block, and fill it exactly.
BLOCKS = (5, 8, 1, 7, 8, 8, 1, 1, 2, 6, 5, 8)
SPLITS = {
    "stateful_core": [ONE_BY_ONE, BLOCKS, (30, 20, 10), (POSITIONS,)],
    "ring_core": [ONE_BY_ONE, BLOCKS],
    "blend_core": [ONE_BY_ONE],
}
IN_THE_RUNTIME = {"stateful_core": BLOCKS, "ring_core": BLOCKS, "blend_core": ONE_BY_ONE}
CASES = [(form, blocks) for form in FORMS for blocks in SPLITS[form]]


def options(form):
    return {} if form == "blend_core" else {"cache_minimum": CACHE_MINIMUM}


def host(form, program, config):
    return BlendHost(program, config.sliding_window) if form == "blend_core" else CoreHost(program, CONTEXT)


def run(conversation, given, blocks):
    """Logits of every position, fed in blocks."""
    rows, start = [], 0
    for length in blocks:
        here = slice(start, start + length)
        rows.append(conversation.run(given.embeds[here], given.per_layer[here]))
        start += length
    return given.head(np.concatenate(rows))


def torch_program(form, weights):
    decoder = Decoder(weights, eager_linears(weights), torch.float32).eval()
    modules = {"stateful_core": StatefulCore, "blend_core": BlendCore}
    module = RingCore(decoder, CONTEXT) if form == "ring_core" else modules[form](decoder)
    return TorchProgram({"main": module}, signature(form, weights.config, CONTEXT, "fp32", **options(form)))


@pytest.fixture(scope="module")
def embedded(tiny_weights, tiny_tables):
    return model(Weights.open(tiny_weights["fp32"]), RawTables.open(tiny_tables))


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return small_artifacts(tmp_path_factory.mktemp("small"), "int8-kmeans-g32")


@pytest.fixture(scope="module")
def small(artifacts):
    """The small model; its reference has the palettes' values expanded, the bundles have the palettes."""
    return model(Weights.open(artifacts["weights"]), RawTables.open(artifacts["tables"]))


@pytest.fixture(scope="module", params=FORMS)
def bundle(request, artifacts, tmp_path_factory):
    """(form, bundle of the small model), as its stage writes it."""
    form = request.param
    out = tmp_path_factory.mktemp("bundles") / f"{form}.aimodel"
    params = {"compute": "fp32", "context": CONTEXT, **options(form)}
    export(STAGES[form], {"weights": artifacts["weights"]}, params, out)
    return form, out


@pytest.mark.parametrize(("form", "blocks"), CASES)
def test_any_blocks_equal_one_pass_of_the_reference(form, blocks, embedded):
    program = torch_program(form, embedded.weights)
    found = run(host(form, program, embedded.weights.config), embedded, blocks)
    assert np.abs(found - embedded.logits).max() <= FP32_LOGITS


def test_the_runtime_computes_the_same(bundle, small):
    """And the bundle has the signature that it was exported with."""
    form, path = bundle
    expected = signature(form, small.weights.config, CONTEXT, "fp32", **options(form))
    with open_bundle(path) as program:
        assert described(program.spec("main")) == described(expected["main"])
        found = run(host(form, program, small.weights.config), small, IN_THE_RUNTIME[form])
    assert np.abs(found - small.logits).max() <= FP32_LOGITS


def test_a_ring_holds_the_last_window_of_what_a_long_cache_holds(small):
    """Position p is in column p % W, whatever blocks it came in."""
    caches = {}
    for form in ("stateful_core", "ring_core"):
        conversation = host(form, torch_program(form, small.weights), small.weights.config)
        run(conversation, small, BLOCKS)
        caches[form] = {name: array.numpy() for name, array in conversation.states.arrays.items()}
    window = small.weights.config.sliding_window
    for name, ring in caches["ring_core"].items():
        long = caches["stateful_core"][name]
        if name.startswith("sliding"):
            held = np.arange(POSITIONS - window, POSITIONS)
            ring, long = ring[:, :, :, held % window], long[:, :, :, held]
        np.testing.assert_allclose(ring, long, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_past_the_last_column_is_a_clear_error(form, small):
    conversation = host(form, torch_program(form, small.weights), small.weights.config)
    for _ in range(CONTEXT):
        conversation.run(small.embeds[:1], small.per_layer[:1])
    with pytest.raises(UserError, match="longer than the 64 positions"):
        conversation.run(small.embeds[:1], small.per_layer[:1])


def test_no_constant_of_a_ring_escapes_content_naming(tmp_path):
    """At the real window, whose constants are too large to stand in the program's text."""

    class Write(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.ring = Ring(512, 700)

        def forward(self, rows, positions, cache):
            block = self.ring.block_columns(positions[:1], positions[-1:])
            cache.copy_(
                chosen_column(self.ring.column_of(positions[:1]), self.ring.numbers).write(cache, rows)
            )
            return block.write(cache, rows) + self.ring.held_before(positions[:1])[:, None]

    cache = TensorSpec("float32", (1, 512, 4))
    spec = FunctionSpec(
        {"rows": TensorSpec("float32", (1, 1, 4)), "positions": TensorSpec("int32", (1,))},
        {"seen": cache},
        {"cache": cache},
    )
    save_bundle([Function("main", Write(), spec)], tmp_path, {})
    data, constants = (tmp_path / "main.mlirb").read_bytes(), read_constants(tmp_path / "main.mlirb")
    assert len(constants) == 3  # the columns of the positions, and the columns' numbers of two rounds
    for constant in constants:
        assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name
