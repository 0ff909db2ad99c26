"""Forms `stateful_core`, `ring_core` and `blend_core`: cores whose K/V are states, in torch.

Their bundles in the runtime are judged by the gates, see `test_gate_states.py`.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from state_models import (
    CACHE_MINIMUM,
    CONTEXT,
    POSITIONS,
    TorchProgram,
    model,
    small_artifacts,
)

from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.coreai.decode_host import BlendHost, CoreHost
from workflow_scripts.errors import UserError
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.state_constants import state_core_constants
from workflow_scripts.gates.structure import content_name
from workflow_scripts.model.blend_core import BlendCore
from workflow_scripts.model.core_step import CoreStep
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.kv_state import LongColumn, Ring, RingColumn, chosen_column
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.ring_core import RingCore
from workflow_scripts.model.signature import FunctionSpec, TensorSpec, signature
from workflow_scripts.model.stateful_core import StatefulCore
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.raw import RawTables

FORMS = ("stateful_core", "ring_core", "blend_core")
ONE_BY_ONE = (1,) * POSITIONS
# A ring takes blocks of at most its window, 8; these also wrap in the middle of a block, and fill it exactly.
BLOCKS = (5, 8, 1, 7, 8, 8, 1, 1, 2, 6, 5, 8)
STEPS = (0,) * POSITIONS
# From one function to the other and back, in the middle of a window and at its end.
HANDED = (5, *[0] * 6, 8, 1, 0, 0, 2, *[0] * 8, 4, *[0] * 22, 2)
SPLITS = {
    "stateful_core": [ONE_BY_ONE, BLOCKS, (30, 20, 10), (POSITIONS,), STEPS, HANDED],
    "ring_core": [ONE_BY_ONE, BLOCKS, STEPS, HANDED],
    "blend_core": [ONE_BY_ONE],
}
CASES = [(form, blocks) for form in FORMS for blocks in SPLITS[form]]


def options(form):
    return {} if form == "blend_core" else {"cache_minimum": CACHE_MINIMUM}


def host(form, program, config):
    return BlendHost(program, config.sliding_window) if form == "blend_core" else CoreHost(program, CONTEXT)


def run(conversation, given, blocks):
    """Logits of every position, fed in blocks; 0 stands for one position by the function `step`."""
    rows, start = [], 0
    for length in blocks:
        here = slice(start, start + (length or 1))
        feed = conversation.run if length else conversation.step
        rows.append(feed(given.embeds[here], given.per_layer[here]))
        start = here.stop
    return given.head(np.concatenate(rows))


def torch_program(form, weights):
    decoder = Decoder(weights, eager_linears(weights), torch.float32).eval()
    sizes = weights.config.sliding_window, CONTEXT
    modules = {
        "stateful_core": lambda: {
            "main": StatefulCore(decoder),
            "step": CoreStep(decoder, LongColumn(*sizes)),
        },
        "ring_core": lambda: {
            "main": RingCore(decoder, CONTEXT),
            "step": CoreStep(decoder, RingColumn(*sizes)),
        },
        "blend_core": lambda: {"main": BlendCore(decoder)},
    }[form]()
    return TorchProgram(modules, signature(form, weights.config, CONTEXT, "fp32", **options(form)))


@pytest.fixture(scope="module")
def embedded(tiny_weights, tiny_tables):
    return model(Weights.open(tiny_weights["fp32"]), RawTables.open(tiny_tables))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    artifacts = small_artifacts(tmp_path_factory.mktemp("small"), "int8-kmeans-g32")
    return model(Weights.open(artifacts["weights"]), RawTables.open(artifacts["tables"]))


@pytest.mark.parametrize(("form", "blocks"), CASES)
def test_any_blocks_equal_one_pass_of_the_reference(form, blocks, embedded):
    program = torch_program(form, embedded.weights)
    found = run(host(form, program, embedded.weights.config), embedded, blocks)
    assert np.abs(found - embedded.logits).max() <= FP32_LOGITS


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


def test_no_constant_of_a_ring_escapes_content_naming(small, tmp_path):
    """At the real window, whose constants are too large to stand in the program's text; a gate expects just these."""

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
    weights = replace(small.weights, config=replace(small.weights.config, sliding_window=512))
    expected = state_core_constants("ring_core", weights, 700, "fp32").constants
    assert {constant.name for constant in constants} <= expected.keys()
