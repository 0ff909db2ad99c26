"""The grid of a checkpoint from quantization-aware training is found again, and nothing else passes for one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiny
from tests.qat_checkpoint import PEAK_LEVELS, put_on_grid, write_qat_checkpoint
from workflow_scripts.checkpoint.safetensors import read_header
from workflow_scripts.errors import UserError
from workflow_scripts.quantize import encode
from workflow_scripts.quantize.linear import quantize_linear
from workflow_scripts.quantize.qat_grid import recover_grid
from workflow_scripts.quantize.recipes import RECIPES
from workflow_scripts.quantize.weights import Linear, Weights
from workflow_scripts.quantize.writer import write_weights

EMBEDDED = Path(__file__).parents[1] / "resources" / "gemma-4-tiny"
QAT = "int4-qat-b32"
# float16 moves a step by 2^-11 of itself, bfloat16 a weight by 2^-8; a level is 8 at most.
FARTHEST = 8 * (2.0**-8 + 2.0**-11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The embedded checkpoint on 4-bit grids."""
    root = tmp_path_factory.mktemp("qat")
    return tiny.build_tree(write_qat_checkpoint(EMBEDDED, root / "published"), root / "checkpoint")


@pytest.fixture(scope="module")
def trees(tmp_path_factory, checkpoint):
    """Weights of that checkpoint in the recipes with a step per block, by name."""
    root = tmp_path_factory.mktemp("weights")
    names = (QAT, "int4-linear-b32", "int4-linear-b32-sym", "int8-linear-b32")
    for name in names:
        (root / name).mkdir()
        write_weights(checkpoint, RECIPES[name], root / name)
    return {name: root / name for name in names}


def report(tree):
    return json.loads((tree / "report.json").read_text())


def bf16(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def decoded(block):
    return Linear(block.codes, block.steps, 32, 4).dequantize()


def grid(levels, step, dtype=ml_dtypes.bfloat16):
    """One row of one block: the levels, then zeros."""
    row = np.zeros((1, 32), np.float32)
    row[0, : len(levels)] = levels
    return (row * np.float32(step)).astype(dtype).astype(np.float32)


def matrices(checkpoint):
    return [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]


def test_the_fixture_is_like_the_published_checkpoint(checkpoint):
    shared = checkpoint.config.first_shared_layer
    assert f"layers.{shared - 1}.self_attn.k_proj.weight" in checkpoint.names()
    assert f"layers.{shared}.self_attn.k_proj.weight" not in checkpoint.names()
    for name in matrices(checkpoint):
        blocks = checkpoint.float32(name).reshape(-1, 32)
        assert max(len(np.unique(block)) for block in blocks) <= 16
    assert checkpoint.tensors["embed_tokens.weight"].dtype == "BF16"


def test_every_value_decodes_to_itself_or_within_the_rounding_of_the_step(checkpoint, trees):
    weights = Weights.open(trees[QAT])
    exact = total = 0
    for name, figures in report(trees[QAT])["tensors"].items():
        stored, original = weights.linear(name), checkpoint.float32(name)
        assert isinstance(stored, Linear) and (stored.bits, stored.block_size) == (4, 32)
        assert stored.codes.min() >= -8 and stored.codes.max() <= 7
        steps = np.repeat(stored.steps.astype(np.float32), 32, axis=1)
        off = np.abs(original - stored.dequantize()) / np.where(steps, steps, 1)
        assert off.max() <= FARTHEST
        assert figures["largest_deviation"] == pytest.approx(off.max(), abs=1e-6)
        same = bf16(stored.dequantize()) == original
        assert figures["exact_share"] == round(same.mean(), 6)
        exact, total = exact + same.sum(), total + same.size
    assert report(trees[QAT])["total"]["exact_share"] == round(exact / total, 6) > 0.99


def test_other_steps_leave_the_grid(trees, capsys):
    totals = {name: report(tree)["total"] for name, tree in trees.items()}
    with capsys.disabled():
        print("\nrecipe               bits/weight  kept to the bit  largest deviation  SNR")
        for name, total in totals.items():
            print(
                f"{name:20} {total['bits_per_weight']:11}  {total['exact_share']:15.2%}  "
                f"{total['largest_deviation']:11.4f} steps  {total['snr_db']} dB"
            )
    assert totals[QAT]["snr_db"] > 50
    for name in ("int4-linear-b32", "int4-linear-b32-sym"):
        assert totals[name]["exact_share"] < 0.7
        assert totals[name]["largest_deviation"] > 0.49
        assert totals[name]["snr_db"] < totals[QAT]["snr_db"] - 20


def test_bits_per_weight(trees):
    for name, bits in ((QAT, 4.5), ("int4-linear-b32", 4.5), ("int8-linear-b32", 8.5)):
        figures = report(trees[name])
        assert {entry["bits_per_weight"] for entry in figures["tensors"].values()} == {bits}
        assert figures["total"]["bits_per_weight"] == bits


def test_bytes_do_not_depend_on_the_host(checkpoint, trees, tmp_path):
    """A fresh process that compiles without AVX and fused multiply-add, other threads, and smaller blocks of rows."""
    script = (
        "import sys; from pathlib import Path\n"
        "from workflow_scripts.checkpoint.reader import Checkpoint\n"
        "from workflow_scripts.quantize import encode\n"
        "from workflow_scripts.quantize.recipes import RECIPES\n"
        "from workflow_scripts.quantize.writer import write_weights\n"
        "encode._BLOCK_WEIGHTS = 1 << 14\n"
        "for name in sys.argv[3:]:\n"
        "    out = Path(sys.argv[2]) / name; out.mkdir()\n"
        "    write_weights(Checkpoint.open(Path(sys.argv[1])), RECIPES[name], out)\n"
    )
    other_host = {
        "NUMBA_NUM_THREADS": "2",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
        "PYTHONHASHSEED": "7",
    }
    subprocess.run(
        [sys.executable, "-c", script, str(checkpoint.source.parent), str(tmp_path), *trees],
        check=True,
        env={**os.environ, **other_host},
    )
    for name, tree in trees.items():
        for file in sorted(path.name for path in tree.iterdir()):
            assert (tmp_path / name / file).read_bytes() == (tree / file).read_bytes(), f"{name}/{file}"


@pytest.mark.parametrize("name", ["embed_tokens_per_layer.weight", "per_layer_model_projection.weight"])
def test_the_tables_lie_on_their_grid_too(checkpoint, name):
    rows = checkpoint.float32(name)
    block = recover_grid(rows, 32, name)
    assert block.quality.fit.exact / rows.size > 0.99
    np.testing.assert_array_equal(block.codes[-1], recover_grid(rows[-1:], 32, name).codes[0])


@pytest.mark.parametrize("std", [1e3, 0.02, 1e-3])
def test_levels_are_those_of_the_training(std):
    made = put_on_grid(np.random.default_rng(0).normal(0, std, (256, 256)), np.random.default_rng(1))
    block = recover_grid(made.values.astype(np.float32), 32, "w")
    steps, levels = made.steps.astype(np.float64), made.levels.reshape(256, -1, 32)
    common = np.gcd.reduce(levels, axis=-1)  # levels with a common divisor are lower levels of a larger step
    np.testing.assert_array_equal(block.codes.reshape(levels.shape), levels // common[..., None])
    np.testing.assert_allclose(block.steps, steps * common, rtol=2.0**-8 + 2.0**-11)


LEVELS = st.lists(st.integers(-8, 7), min_size=1, max_size=32)
STEPS = st.floats(2.0**-14, 8000, width=32)


@settings(max_examples=150)
@given(levels=LEVELS, step=STEPS)
def test_every_grid_is_found(levels, step):
    rows = grid(levels, step)
    block = recover_grid(rows, 32, "w")
    assert block.codes.min() >= -8 and block.codes.max() <= 7
    assert block.quality.fit.deviation <= FARTHEST
    np.testing.assert_array_equal(bf16(block.codes * bf16(np.float32(step) * np.ones(1))) == 0, rows == 0)
    again = recover_grid(bf16(decoded(block)), 32, "w")
    np.testing.assert_array_equal(again.codes, block.codes)


@settings(max_examples=150)
@given(levels=LEVELS, step=st.floats(2.0**-13, 4000, width=16))
def test_a_float16_step_gives_back_every_bit(levels, step):
    """Least squares alone, rounded, is one float16 number off in one of seven blocks (measured)."""
    rows = grid(levels, step)
    block = recover_grid(rows, 32, "w")
    np.testing.assert_array_equal(bf16(decoded(block)), rows)
    assert block.quality.fit.exact == 32


def test_products_that_were_rounded_to_float32_first_are_on_the_grid():
    """As a trainer makes them; every peak level, with steps all over a binade."""
    random = np.random.default_rng(0)
    steps = random.uniform(0.001, 0.002, (4096, 1)).astype(np.float32)
    levels = random.integers(-8, 8, (4096, 32)).astype(np.float32)
    for peak in PEAK_LEVELS:
        rows = bf16(np.clip(levels, -peak, min(peak, 7)) * steps)
        assert recover_grid(rows, 32, "w").quality.fit.exact > 0.99 * rows.size


def test_blocks_of_zeros_and_single_values():
    rows = np.concatenate([grid([], 1.0), grid([0, 1], 0.01), grid([-1], 0.01), grid([-0.0], 1.0)])
    block = recover_grid(rows, 32, "w")
    assert (block.steps == 0).reshape(-1).tolist() == [True, False, False, True]
    np.testing.assert_array_equal(bf16(decoded(block)), rows)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_copy_in_another_dtype_has_the_same_grid(dtype):
    levels = np.arange(-8, 8)
    block = recover_grid(grid(levels, 0.0101, dtype), 32, "w")
    np.testing.assert_array_equal(block.codes[0, :16], levels)


@pytest.mark.parametrize(
    ("change", "least"),
    [
        (lambda row: row[5] * 1.02, 0.1),  # a weight at level 7 by 2%, five times its rounding
        (lambda row: row[5] + row[1] / 4, 0.2),  # a quarter of a step
        (lambda row: row[5] + row[1], 0.4),  # level 8 has no code
    ],
)
def test_a_block_off_the_grid_is_named(change, least):
    rows = np.tile(bf16(np.float32(0.0101) * np.arange(-8, 8)), (6, 8))
    rows[:, 1::16] = rows[:, 9::16]  # level 1
    rows[:, 5::16] = rows[:, 15::16]  # level 7
    recover_grid(rows, 32, "layers.3.x")
    rows[4, 64 + 5] = bf16(np.float32(change(rows[4, 64:96])))
    with pytest.raises(UserError, match=r"layers\.3\.x, row 14, block 2, is off the 4-bit grid") as caught:
        recover_grid(rows, 32, "layers.3.x", first_row=10)
    message = str(caught.value)
    deviation = float(message.split(" of a step")[0].split()[-1])
    assert least < deviation <= 1
    assert "int4-linear-b32" in message


def test_level_8_is_no_code():
    """A block whose peak is at level -8 must not take +8 along; one with a positive peak there is off the grid."""
    for levels in ([-8, 8, 3, 1], [8, 3, 1]):
        with pytest.raises(UserError, match="off the 4-bit grid"):
            recover_grid(grid(levels, 0.0078125), 32, "w")


def test_levels_within_the_tolerance_but_of_no_common_step_are_off_the_grid():
    """One weight is rounded up by almost a unit, another down: each alone could be on the grid of the peak."""
    row = grid([-8, 5, 5], 0.01)
    unit = 2.0**-12  # of the last place at 0.05
    row[0, 1], row[0, 2] = row[0, 1] + unit, row[0, 2] - unit
    with pytest.raises(UserError, match="off the 4-bit grid"):
        recover_grid(row, 32, "w")


def test_weights_of_no_training_are_off_the_grid():
    rows = bf16(np.random.default_rng(0).normal(0, 0.02, (4, 64)).astype(np.float32))
    with pytest.raises(UserError, match="w, row 0, block 0, is off the 4-bit grid"):
        recover_grid(rows, 32, "w")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "row 7, block 1, .*not a number"),
        (np.float32(3e38), "row 7, block 1, needs a step of .*beyond 65504"),
        (np.float32(1e-38), "row 7, block 1, needs a step of .*float16 does not hold"),
        (np.float32(1e-42), "row 7, block 1, needs a step of .*float16 does not hold"),
    ],
)
def test_steps_that_float16_cannot_hold_are_named(value, message):
    rows = np.tile(grid([-8, 3], 0.01), (3, 2))
    rows[2, 32:] = 0
    rows[2, 40] = value
    with pytest.raises(UserError, match=message):
        recover_grid(rows, 32, "w", first_row=5)


def test_a_tiny_step_is_kept_where_float16_holds_it_and_named_where_not():
    unit = 2.0**-24
    np.testing.assert_array_equal(decoded(recover_grid(grid([-8, 3], 40 * unit), 32, "w"))[0, 0], -320 * unit)
    with pytest.raises(
        UserError, match=r"w, row 0, block 0, needs a step of at most .*float16 does not hold"
    ):
        recover_grid(grid([-8, 3], 5.5 * unit), 32, "w")


def test_a_block_in_a_later_block_of_rows_is_named_by_its_row(checkpoint, tmp_path, monkeypatch):
    name = "layers.0.mlp.down_proj.weight"
    values = np.array(checkpoint.array(name))
    values[50, 40] = values[50, 32:64].max() * 2
    values[50, 41] = values[50, 40] * 0.77
    tiny.write_tensors(tmp_path / "other.safetensors", {name: values})
    other = replace(
        checkpoint,
        tensors={**checkpoint.tensors, name: read_header(tmp_path / "other.safetensors")[name]},
    )
    monkeypatch.setattr(encode, "_BLOCK_WEIGHTS", 4096)
    with pytest.raises(UserError, match=rf"{name}, row 50, block 1, is off the 4-bit grid"):
        write_weights(other, RECIPES[QAT], tmp_path)


def test_the_recipe_refuses_another_checkpoint_by_name(tmp_path):
    other = tiny.build_tiny(tmp_path)
    with pytest.raises(UserError, match=r"layers\.0\..*weight, row 0, block 0, is off the 4-bit grid"):
        write_weights(other, RECIPES[QAT], tmp_path)


def test_default_steps_keep_only_blocks_whose_peak_is_at_their_level():
    """The published measurement's reason: a packer's fixed level of the peak is right in some blocks only."""
    made = put_on_grid(np.random.default_rng(0).normal(0, 0.02, (64, 256)), np.random.default_rng(1))
    rows = made.values.astype(np.float32)
    block = quantize_linear(rows, 4, "clipping", 32, "w")
    kept = (bf16(decoded(block)) == rows).reshape(64, -1, 32).all(-1)
    peaks = np.abs(made.levels.reshape(64, -1, 32)).max(-1)
    assert not kept[(peaks != 7) & (peaks != 1)].any() and kept[peaks == 7].mean() > 0.25


def test_read_back_is_memory_mapped(trees):
    stored = Weights.open(trees[QAT]).linear("embed_tokens.weight")
    assert isinstance(stored.codes.base, np.memmap) or isinstance(stored.codes, np.memmap)
    assert read_header(trees[QAT] / "head.safetensors")["embed_tokens.weight.codes"].dtype == "I8"
