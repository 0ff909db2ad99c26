"""Linear quantization: the schemes of coreai-opt, bounds of the error, edges of float16, and the layer in a bundle."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.linear import quantize_linear
from workflow_scripts.quantize.weights import Linear
from workflow_scripts.scratch import Scratch

RANGES = {  # (bits, scheme) -> lowest code, highest code, levels from 0 to the peak
    (4, "clipping"): (-7, 7, 7),
    (4, "symmetric"): (-8, 7, 7.5),
    (8, "clipping"): (-127, 127, 127),
    (8, "symmetric"): (-128, 127, 127.5),
}
UNIT = 2.0**-24  # the smallest float16


def draw(shape=(8, 64), std=0.02, seed=0):
    values = np.random.default_rng(seed).normal(0, std, shape)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def quantize(rows, bits=4, scheme="clipping", name="w", first_row=0):
    return quantize_linear(rows, bits, scheme, 32, name, first_row)


def dequantize(block):
    return Linear(block.codes, block.steps, 32, 4).dequantize()


def in_blocks(rows):
    return rows.reshape(len(rows), -1, 32)


def steps_of_weights(block):
    return np.repeat(block.steps.astype(np.float64), 32, axis=1)


@pytest.mark.parametrize(("bits", "scheme"), RANGES)
def test_codes_and_steps_by_their_definition(bits, scheme):
    lowest, highest, levels = RANGES[bits, scheme]
    rows = draw((16, 128))
    block = quantize(rows, bits, scheme)
    expected = (np.abs(in_blocks(rows)).max(-1).astype(np.float64) / levels).astype(np.float16)
    np.testing.assert_array_equal(block.steps, expected)
    assert block.steps.dtype == np.float16 and block.codes.dtype == np.int8
    nearest = np.clip(np.rint(rows / steps_of_weights(block).astype(np.float32)), lowest, highest)
    np.testing.assert_array_equal(block.codes, nearest)
    assert block.codes.min() == lowest and block.codes.max() == highest


def coreai_opts(rows, bits, scheme):
    """What coreai-opt makes of a float32 layer: dequantized weights, and its steps [N, K / 32]."""
    import torch
    from coreai_opt.quantization import Quantizer, QuantizerConfig

    model = torch.nn.Sequential(torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False))
    model[0].weight.data = torch.from_numpy(rows.copy())
    spec = {
        "dtype": f"int{bits}",
        "qscheme": {"clipping": "symmetric_with_clipping", "symmetric": "symmetric"}[scheme],
        "granularity": {"type": "per_block", "block_size": 32, "axis": 1},
    }
    settings = {"op_state_spec": {"weight": spec}, "op_input_spec": None, "op_output_spec": None}
    config = QuantizerConfig.from_dict(
        {"quantization_config": {"execution_mode": "eager", "global_config": settings}}
    )
    prepared = Quantizer(model, config).prepare(example_inputs=(torch.zeros(1, rows.shape[1]),))
    steps = prepared[0].parametrizations.weight[0].qparams_calculator.scale
    return prepared[0].weight.detach().numpy(), steps.detach().numpy()


@pytest.mark.parametrize(("bits", "scheme"), RANGES)
def test_both_schemes_are_coreai_opts(bits, scheme):
    """Its steps are float32; ours are those in float16, and a code differs only where that moves a weight's tie."""
    pytest.importorskip("coreai_opt")
    rows = draw((32, 256))
    theirs, their_steps = coreai_opts(rows, bits, scheme)
    block = quantize(rows, bits, scheme)
    np.testing.assert_array_equal(block.steps, their_steps.astype(np.float16))
    their_codes = np.rint(in_blocks(theirs) / their_steps[:, :, None]).reshape(rows.shape)
    differ = block.codes != their_codes
    assert np.abs(block.codes - their_codes).max() <= 1
    exact = rows / steps_of_weights(block)
    from_tie = np.abs(exact - np.floor(exact) - 0.5)
    assert (from_tie[differ] <= np.abs(exact[differ]) * 2**-11).all()
    assert differ.mean() < (0.02 if bits == 4 else 0.1)


@pytest.mark.parametrize("bits", [4, 8])
def test_clipping_keeps_peaks_and_symmetric_moves_them_by_half_a_step(bits):
    rows = np.zeros((2, 32), np.float32)
    rows[:, 0], rows[:, 1] = [1.0, -1.0], 0.1
    for scheme, moved in (("clipping", 0.0), ("symmetric", 0.5)):
        block = quantize(rows, bits, scheme)
        off = np.abs(dequantize(block) - rows)[:, 0] / block.steps[:, 0]
        np.testing.assert_allclose(off, moved, atol=2.0**-11 * 128)


FLOATS = st.floats(-60000, 60000, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.sampled_from([32, 64])), elements=FLOATS)
SMALL = hnp.arrays(np.float32, (2, 32), elements=st.floats(-(2.0**-13), 2.0**-13, width=32))


@settings(max_examples=80)
@given(rows=st.one_of(ROWS, SMALL), kind=st.sampled_from(list(RANGES)))
def test_invariants(rows, kind):
    bits, scheme = kind
    lowest, highest, levels = RANGES[kind]
    block = quantize(rows, bits, scheme)
    assert block.codes.min() >= lowest and block.codes.max() <= highest
    peaks = np.abs(in_blocks(rows)).max(-1)
    np.testing.assert_array_equal(block.steps == 0, peaks == 0)
    steps = steps_of_weights(block)
    off = np.abs(rows - dequantize(block).astype(np.float64))
    # Half a step; a peak of `symmetric` lies half a step beyond the last level, and float16 rounds that step.
    beyond = 0 if scheme == "clipping" else levels * 2.0**-11
    assert (off <= steps * (0.5 + beyond) * (1 + 2.0**-15)).all()
    np.testing.assert_allclose(
        block.quality.fit.deviation, (off / np.where(steps, steps, 1)).max(), rtol=1e-6, atol=1e-9
    )
    exact = dequantize(block).astype(ml_dtypes.bfloat16).astype(np.float32) == rows
    assert block.quality.fit.exact == exact.sum() and block.quality.fit.weights == rows.size


@settings(max_examples=40)
@given(rows=ROWS, bits=st.sampled_from([4, 8]))
def test_what_was_quantized_stays_as_it_is(rows, bits):
    """Not with scheme `symmetric`, whose peak is no level, nor with steps that are rounded up, below 2^-14."""
    rows[np.abs(rows) < 1] = 0
    once = quantize(rows, bits)
    again = quantize(dequantize(once), bits)
    np.testing.assert_array_equal(again.codes, once.codes)
    np.testing.assert_array_equal(again.steps, once.steps)
    assert again.quality.error == 0 and again.quality.fit.deviation == 0


def test_a_block_of_zeros_has_step_0():
    rows = draw((3, 96))
    rows[1, 32:64] = 0
    rows[1, 40] = -0.0
    block = quantize(rows)
    assert block.steps[1, 1] == 0 and not block.codes[1, 32:64].any()
    assert not np.signbit(block.steps).any() and (np.delete(block.steps.reshape(-1), 4) > 0).all()
    assert not dequantize(block)[1, 32:64].any()


@pytest.mark.parametrize(
    ("peak", "units"),
    [
        (7 * UNIT, 1),  # a float16 number as it is
        (8 * UNIT, 2),  # rounded to the nearest, the peak would be cut to 7 / 8
        (0.1 * UNIT, 1),  # rounded to the nearest, it would be 0
        (7 * 1000.4 * UNIT, 1001),
        (7 * 2000.4 * UNIT, 2000),  # not below 2^-14: to the nearest
    ],
)
def test_tiny_steps_are_rounded_up(peak, units):
    rows = np.zeros((1, 32), np.float32)
    rows[0, :3] = [peak, -peak, peak / 3]
    block = quantize(rows)
    assert block.steps[0, 0] == units * UNIT
    assert (np.abs(dequantize(block) - rows) <= units * UNIT / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "infinite or not a number"),
        (-np.inf, "infinite or not a number"),
        (4e6, "needs a step of 571429, beyond 65504"),
    ],
)
def test_what_cannot_be_held_is_named_by_tensor_row_and_block(value, message):
    rows = draw((8, 96))
    rows[3, 70] = value
    with pytest.raises(UserError, match=rf"layers\.1\.x, row 103, block 2, .*{message}"):
        quantize(rows, name="layers.1.x", first_row=100)


def test_the_largest_step_is_held():
    rows = np.full((1, 32), 65504 * 7, np.float32)
    np.testing.assert_array_equal(dequantize(quantize(rows)), rows)


@pytest.mark.parametrize("shape", [(8, 48), (0, 32), (32, 0), (64,)])
def test_rows_that_are_no_whole_blocks_are_refused_by_name(shape):
    with pytest.raises(UserError, match=r"odd has shape .* multiple of 32"):
        quantize(np.zeros(shape, np.float32), name="odd")


def test_dequantize_gives_any_rows():
    block = quantize(draw((40, 96)))
    stored = Linear(block.codes, block.steps, 32, 4)
    whole = stored.dequantize()
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, block.codes * steps_of_weights(block))
    for rows in (slice(5, 7), slice(30, 40), slice(8, 8), slice(31, None)):
        np.testing.assert_array_equal(stored.dequantize(rows), whole[rows])


# ---- the layer in a bundle


def layer(bits, codes):
    steps = np.random.default_rng(1).uniform(0.001, 0.01, (len(codes), codes.shape[1] // 32))
    return Linear(codes, steps.astype(np.float16), 32, bits)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """(bits, codes of two bits only) -> the stored matrix and its float32 bundle."""
    import torch

    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.model.linear import BlockLinear
    from workflow_scripts.model.signature import FunctionSpec, TensorSpec

    random, made = np.random.default_rng(0), {}
    for bits, few in ((4, False), (4, True), (8, False), (8, True)):
        half = 2 if few else 1 << (bits - 1)
        stored = layer(bits, random.integers(-half, half, (64, 96)).astype(np.int8))
        out = tmp_path_factory.mktemp("linear") / "layer.aimodel"
        out.mkdir()
        spec = FunctionSpec(
            {"x": TensorSpec("float32", (1, 2, 96))}, {"y": TensorSpec("float32", (1, 2, 64))}
        )
        save_bundle([Function("main", BlockLinear(stored, torch.float32), spec)], out, {"form": "test"})
        made[bits, few] = (stored, out)
    return made


@pytest.mark.parametrize("few", [False, True], ids=["all codes", "codes of 2 bits"])
def test_a_bundle_stores_4_bits_per_code(bundles, few):
    """Also where all codes would go into 2 bits: two to a byte, the first in the lower half."""
    from workflow_scripts.coreai.bytecode import read_constants

    stored, bundle = bundles[4, few]
    program = bundle / "main.mlirb"
    (constant,) = read_constants(program)
    codes = stored.codes.reshape(-1).view(np.uint8) & 15
    packed = (codes[0::2] | codes[1::2] << 4).tobytes()
    assert program.read_bytes()[constant.offset : constant.offset + constant.size] == packed
    assert constant.size * 8 == 4 * stored.codes.size


@pytest.mark.parametrize("few", [False, True], ids=["all codes", "codes of 2 bits"])
def test_a_bundle_stores_8_bits_per_code(bundles, few):
    from workflow_scripts.coreai.bytecode import read_constants

    stored, bundle = bundles[8, few]
    program = bundle / "main.mlirb"
    (constant,) = read_constants(program)
    assert program.read_bytes()[constant.offset : constant.offset + constant.size] == stored.codes.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_bundle_runs_as_the_dequantized_layer(bundles, bits):
    import torch

    from workflow_scripts.coreai.runtime import open_bundle
    from workflow_scripts.model.linear import BlockLinear, DenseLinear

    stored, bundle = bundles[bits, False]
    x = np.random.default_rng(2).standard_normal((1, 2, 96)).astype(np.float32)
    expected = DenseLinear(torch.from_numpy(stored.dequantize()))(torch.from_numpy(x))
    eager = BlockLinear(stored, torch.float32)(torch.from_numpy(x))
    np.testing.assert_array_equal(eager, expected)
    with open_bundle(bundle) as opened:
        found = opened.call("main", {"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_both_factories_take_the_stored_kind(tmp_path):
    """Expanded for the reference, as codes for a bundle."""
    import torch

    from workflow_scripts.model.linear import BlockLinear, ExpandedLinear, eager_linears, exported_linears

    class Stored:
        def linear(self, name):
            return layer(4, np.arange(-8, 8, dtype=np.int8).repeat(32).reshape(16, 32))

    exported, eager = (
        exported_linears(Stored(), torch.float16, Scratch(tmp_path))("w"),
        eager_linears(Stored())("w"),
    )
    assert isinstance(exported, BlockLinear) and exported.steps.dtype == torch.float16
    assert isinstance(eager, ExpandedLinear)
    weight, x = Stored().linear("w").dequantize(), np.eye(32, dtype=np.float32)
    np.testing.assert_array_equal(eager(torch.from_numpy(x)), weight.T)
