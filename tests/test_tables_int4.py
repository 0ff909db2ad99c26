"""The raw gather dump on the 4-bit grid: documented bytes, the checkpoint's own values, a gate that finds damage."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import tiny
from tests.qat_checkpoint import build_qat
from workflow_scripts.checkpoint.safetensors import read_header
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.stages import gate_tables_int4
from workflow_scripts.stages import tables_int4 as stage
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.int4 import Int4Tables, decode_rows
from workflow_scripts.tables.int4_writer import pack_codes, write_int4_tables
from workflow_scripts.tables.open import open_tables
from workflow_scripts.tables.raw import RawTables
from workflow_scripts.tables.writer import write_raw_tables

ROOT = Path(__file__).parents[1]
EMBED, PER_LAYER = "embed_tokens.weight", "embed_tokens_per_layer.weight"
PROJECTION, PROJECTION_NORM = "per_layer_model_projection.weight", "per_layer_projection_norm.weight"
FILES = {EMBED: "embed_tokens", PER_LAYER: "embed_per_layer"}
IDS = np.array([2, 105, 7, 7, 0, 700])
# float16 moves a step by 2^-11 of itself, bfloat16 a weight by 2^-8; a level is 8 at most.
FARTHEST = 8 * (2.0**-8 + 2.0**-11)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_qat(ROOT / "resources" / "gemma-4-tiny", tmp_path_factory.mktemp("qat"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    out = tmp_path_factory.mktemp("tables")
    write_int4_tables(checkpoint, out)
    return out


@pytest.fixture
def copy(folder, tmp_path):
    """A dump that a test may damage."""
    out = tmp_path / "tables"
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    return out


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def bf16(values):
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def values_by_the_document(folder, table, rows, width):
    """Rows [n, width] float64, read as the reader's documentation says, one value after the other."""
    codes, steps = (folder / f"{table}.i4").read_bytes(), (folder / f"{table}.step.f16").read_bytes()
    found = np.empty((len(rows), width))
    for index, row in enumerate(rows):
        for column in range(width):
            byte = codes[(row * width + column) // 2]
            nibble = byte >> 4 if column % 2 else byte & 15
            block = row * (width // 32) + column // 32
            step = np.frombuffer(steps, "<f2", 1, 2 * block)[0]
            found[index, column] = (nibble - 8) * float(step)
    return found


def test_files_and_sizes(folder, checkpoint):
    config = checkpoint.config
    vocab, hidden, size = config.vocab_size, config.hidden_size, config.hidden_size_per_layer_input
    row = config.num_hidden_layers * size
    assert {name: len(data) for name, data in contents(folder).items() if name != "meta.json"} == {
        "embed_tokens.i4": vocab * hidden // 2,
        "embed_tokens.step.f16": vocab * hidden // 32 * 2,
        "embed_per_layer.i4": vocab * row // 2,
        "embed_per_layer.step.f16": vocab * row // 32 * 2,
        "proj.f32": row * hidden * 4,
        "proj_norm.f32": size * 4,
    }
    for name, file in ((PROJECTION, "proj.f32"), (PROJECTION_NORM, "proj_norm.f32")):
        assert (folder / file).read_bytes() == checkpoint.float32(name).tobytes()


def test_meta_has_the_keys_of_int8_and_those_of_the_layout(folder, checkpoint, tmp_path):
    write_raw_tables(checkpoint, tmp_path)
    published, found = (json.loads((at / "meta.json").read_text()) for at in (tmp_path, folder))
    assert found == published | {"format": "int4-b32", "block_size": 32}
    assert found["checkpoint"] == checkpoint.digest


@pytest.mark.parametrize("name", FILES)
def test_bytes_and_reader_follow_the_document(folder, checkpoint, name):
    tables, rows = Int4Tables.open(folder), IDS[:3]
    expected = values_by_the_document(folder, FILES[name], rows, checkpoint.shape(name)[1])
    found = tables.embed_values(rows) if name == EMBED else tables.per_layer_values(rows)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FILES)
def test_values_are_the_checkpoints_but_for_the_rounding_of_the_step(folder, checkpoint, name):
    tables, ids = Int4Tables.open(folder), np.arange(checkpoint.config.vocab_size)
    found = tables.embed_values(ids) if name == EMBED else tables.per_layer_values(ids)
    steps = tables.embed_steps if name == EMBED else tables.per_layer_steps
    weights = checkpoint.float32(name)
    assert np.mean(bf16(found) == weights) > 0.99
    bound = FARTHEST * np.repeat(steps.astype(np.float32), 32, axis=1)
    assert (np.abs(found - weights) <= bound).all()


def test_front_end_equals_an_independent_computation(folder, checkpoint):
    """In float64 from the checkpoint's values, as in HF's modeling_gemma4.py."""
    config, tables = checkpoint.config, Int4Tables.open(folder)
    hidden, size = config.hidden_size, config.hidden_size_per_layer_input
    weight = {name: checkpoint.float32(name).astype(np.float64) for name in (*FILES, PROJECTION)}
    embeds = weight[EMBED][IDS] * hidden**0.5
    tokens = weight[PER_LAYER][IDS].reshape(len(IDS), -1, size) * size**0.5
    context = (embeds @ weight[PROJECTION].T * hidden**-0.5).reshape(tokens.shape)
    context *= (np.mean(context**2, axis=-1, keepdims=True) + config.rms_norm_eps) ** -0.5
    inputs = (context * checkpoint.float32(PROJECTION_NORM) + tokens) * 2**-0.5
    # Both are off by 2^-8 of a value at most, and by 2^-9 usually: that is how exact the checkpoint's own numbers are.
    np.testing.assert_allclose(tables.embed(IDS), embeds, rtol=2.0**-8 + 2.0**-11)
    np.testing.assert_allclose(tables.token_part(IDS), tokens, rtol=2.0**-8 + 2.0**-11)
    assert np.abs(tables.per_layer_inputs(IDS, tables.embed(IDS)) - inputs).max() < 0.02


CODES = hnp.arrays(
    np.int8,
    st.tuples(st.integers(1, 4), st.integers(1, 3).map(lambda blocks: 32 * blocks)),
    elements=st.integers(-8, 7),
)


@settings(max_examples=100)
@given(codes=CODES, seed=st.integers(0, 1000))
def test_every_code_is_had_back_times_its_step(codes, seed):
    rows, width = codes.shape
    steps = np.random.default_rng(seed).uniform(1e-7, 1, (rows, width // 32)).astype(np.float16)
    packed = pack_codes(codes)
    assert packed.dtype == np.uint8 and packed.shape == (rows, width // 2)
    np.testing.assert_array_equal(packed & 15, codes[:, 0::2] + 8)
    np.testing.assert_array_equal(packed >> 4, codes[:, 1::2] + 8)
    exact = codes * np.repeat(steps.astype(np.float64), 32, axis=1)
    np.testing.assert_array_equal(decode_rows(packed, steps), exact)


def test_bytes_do_not_depend_on_block_size_and_the_stage_writes_the_same(folder, checkpoint, tmp_path):
    for name in ("1", "10000", "stage"):
        out = tmp_path / name
        out.mkdir()
        if name == "stage":
            stage.run(Job({"checkpoint": checkpoint.source.parent}, {}, {}, out))
        else:
            write_int4_tables(checkpoint, out, int(name))
        assert contents(out) == contents(folder)


def test_bytes_do_not_depend_on_threads(folder, checkpoint, tmp_path):
    for threads in (2, 7):
        out = tmp_path / str(threads)
        out.mkdir()
        write_int4_tables(checkpoint, out, 4096, threads)
        assert contents(out) == contents(folder)


def test_reader_needs_numpy_only():
    code = "import sys, workflow_scripts.tables.open; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_each_layout_is_opened_by_what_its_meta_says(folder, checkpoint, tmp_path, copy):
    write_raw_tables(checkpoint, tmp_path)
    assert isinstance(open_tables(tmp_path), RawTables) and isinstance(open_tables(folder), Int4Tables)
    with pytest.raises(
        UserError, match="is of tables with format int4-b32, block_size 32, not with int8 rows"
    ):
        RawTables.open(folder)
    with pytest.raises(UserError, match="is of tables with int8 rows, not with format int4-b32"):
        Int4Tables.open(tmp_path)
    edit_meta(copy, format="int3-b32")
    with pytest.raises(UserError, match=r"meta\.json: format is 'int3-b32', this version reads int4-b32"):
        open_tables(copy)
    (copy / "meta.json").unlink()
    with pytest.raises(UserError, match=r"is not a raw gather dump: it has no meta\.json"):
        open_tables(copy)


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(folder, wrong):
    tables = Int4Tables.open(folder)
    for read in (tables.embed, tables.token_part):
        with pytest.raises(UserError, match=f"token id {wrong} is outside"):
            read(np.array([0, wrong]))


@pytest.mark.parametrize("name", ["embed_tokens.i4", "embed_per_layer.step.f16", "proj.f32"])
def test_a_file_of_wrong_size_or_missing_is_named(copy, name):
    data = (copy / name).read_bytes()
    for content in (data[:-1], data + b"\0"):
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} has {len(content)} bytes"):
            Int4Tables.open(copy)
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        Int4Tables.open(copy)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"block_size": 16}, "is of tables with format int4-b32, block_size 16"),
        ({"block_size": None}, "is of tables with format int4-b32, not with"),
        ({"V": 512}, r"embed_tokens\.i4 has .* bytes, but meta\.json says \[512, 48\]"),  # of another model
        ({"D": 80}, "D is 80, not a multiple of 32"),
        ({"checkpoint": None}, r"missing or unknown keys \(checkpoint\)"),
        ({"L": 5}, "PLD is 320, not L x ld = 160"),
    ],
)
def test_wrong_meta_is_named(copy, edit, message):
    edit_meta(copy, **edit)
    with pytest.raises(UserError, match=message):
        open_tables(copy)


def edit_meta(folder, **values):
    meta = json.loads((folder / "meta.json").read_text()) | values
    meta = {key: value for key, value in meta.items() if value is not None}
    (folder / "meta.json").write_text(json.dumps(meta))


def with_tensor(checkpoint, name, values, folder):
    """The checkpoint with another tensor."""
    tiny.write_tensors(folder / "other.safetensors", {name: values})
    other = read_header(folder / "other.safetensors")[name]
    return replace(checkpoint, tensors={**checkpoint.tensors, name: other})


@pytest.mark.parametrize("name", FILES)
def test_a_block_off_the_grid_is_named(checkpoint, tmp_path, name):
    values = np.array(checkpoint.array(name))
    values[50, 40] = values[50, 32:64].max() * 2
    values[50, 41] = values[50, 40] * 0.77
    other = with_tensor(checkpoint, name, values, tmp_path)
    with pytest.raises(UserError, match=rf"{name}, row 50, block 1, is off the 4-bit grid.* form raw_tables"):
        write_int4_tables(other, tmp_path, 4096)  # in a later block of rows


def test_tables_of_no_such_training_are_refused(tmp_path):
    with pytest.raises(UserError, match=rf"{EMBED}, row 0, block 0, is off the 4-bit grid"):
        write_int4_tables(tiny.build_tiny(tmp_path), tmp_path)


@pytest.mark.parametrize("name", [*FILES, PROJECTION, PROJECTION_NORM])
def test_a_value_that_is_not_finite_is_refused_by_name(checkpoint, tmp_path, name):
    values = np.array(checkpoint.array(name))
    values.reshape(-1)[-1] = np.nan
    with pytest.raises(UserError, match=f"{name}.* holds a .* not a number"):
        write_int4_tables(with_tensor(checkpoint, name, values, tmp_path), tmp_path)


# --- the gate ----------------------------------------------------------------------------------------------------


def nothing(tables):
    pass


def shift_rows(tables):
    for file, dtype in (("embed_per_layer.i4", np.uint8), ("embed_per_layer.step.f16", np.float16)):
        stored = np.memmap(tables / file, dtype, "r+").reshape(1024, -1)
        stored[:] = np.roll(stored, 1, axis=0)


def zero_values(tables):
    np.memmap(tables / "embed_per_layer.i4", np.uint8, "r+")[:] = 0x88


def values_of_another_checkpoint(tables):
    """Of the same shape: only the values tell."""
    for file, dtype in (("embed_per_layer.i4", np.uint8), ("embed_per_layer.step.f16", np.float16)):
        stored = np.memmap(tables / file, dtype, "r+")
        stored[:] = np.random.default_rng(0).permutation(stored)


def swap_nibbles(tables):
    codes = np.memmap(tables / "embed_tokens.i4", np.uint8, "r+")
    codes[:] = (codes >> 4) | (codes << 4)


def one_level(tables):
    codes = np.memmap(tables / "embed_tokens.i4", np.uint8, "r+")
    codes[5 * 48 + 3] ^= 1


def other_step(tables):
    """A hundredth of itself, in one block."""
    steps = np.memmap(tables / "embed_per_layer.step.f16", np.float16, "r+")
    steps[7 * 10 + 1] *= 1.01


def four_units(tables):
    """All steps four float16 numbers further: less than half a percent."""
    steps = np.memmap(tables / "embed_tokens.step.f16", np.uint16, "r+")
    steps += 4


def huge_steps(tables):
    np.memmap(tables / "embed_tokens.step.f16", np.float16, "r+")[:] = 60000
    np.memmap(tables / "embed_tokens.i4", np.uint8, "r+")[:] = 0x88


def no_step(tables):
    np.memmap(tables / "embed_tokens.step.f16", np.float16, "r+")[4 * 3] = np.nan


def alter_projection(tables):
    np.memmap(tables / "proj.f32", np.float32, "r+")[9] += 1e-3


def alter_factor(tables):
    edit_meta(tables, embed_scale_pl=4.0)


def alter_origin(tables):
    edit_meta(tables, checkpoint="ab" * 32)


def lose_a_file(tables):
    (tables / "embed_per_layer.step.f16").unlink()


BEYOND, SHARE = "error beyond the rounding of weight and step", "share of weights kept to the bit"


@pytest.mark.parametrize(
    ("damage", "checks"),
    [
        (nothing, {}),
        (shift_rows, {f"{PER_LAYER}: {BEYOND}": "row", f"{PER_LAYER}: {SHARE}": "0."}),
        (zero_values, {f"{PER_LAYER}: {BEYOND}": "row", f"{PER_LAYER}: {SHARE}": "0."}),
        (
            values_of_another_checkpoint,
            {f"{PER_LAYER}: {BEYOND}": "row", f"{PER_LAYER}: {SHARE}": "0."},
        ),
        (swap_nibbles, {f"{EMBED}: {BEYOND}": "row", f"{EMBED}: {SHARE}": "0."}),
        (one_level, {f"{EMBED}: {BEYOND}": "row 5"}),
        (other_step, {f"{PER_LAYER}: {BEYOND}": "row 7"}),
        (four_units, {f"{EMBED}: {BEYOND}": "row", f"{EMBED}: {SHARE}": "0."}),
        (huge_steps, {f"{EMBED}: {BEYOND}": "row", f"{EMBED}: {SHARE}": "0."}),
        (no_step, {f"{EMBED}: {BEYOND}": "nan at row 4"}),
        (alter_projection, {f"{PROJECTION}: values": "rows from 0"}),
        (alter_factor, {"meta.json": "embed_scale_pl is 4.0"}),
        (alter_origin, {"checkpoint of the tables": "abababababab"}),
        (lose_a_file, {"the target is read and runs": "embed_per_layer.step.f16 is missing"}),
    ],
)
def test_tables_that_are_not_the_checkpoints_are_found(copy, checkpoint, tmp_path, damage, checks):
    damage(copy)
    out = tmp_path / "out"
    out.mkdir()
    job = Job({"tables": copy, "checkpoint": checkpoint.source.parent}, {}, {}, out)
    if checks:
        with pytest.raises(GateFailed):
            gate_tables_int4.run(job)
    else:
        gate_tables_int4.run(job)
    verdict = json.loads((out / "verdict.json").read_text())
    failed = {check["name"]: check["found"] for check in verdict["checks"] if not check["passed"]}
    assert failed.keys() == checks.keys()
    assert all(text in failed[name] for name, text in checks.items())


def test_the_gate_tells_how_much_is_exact(folder, checkpoint, tmp_path):
    gate_tables_int4.run(Job({"tables": folder, "checkpoint": checkpoint.source.parent}, {}, {}, tmp_path))
    measured = json.loads((tmp_path / "measured.json").read_text())
    for name in FILES:
        assert 0.99 < measured[f"{name}: {SHARE}"] <= 1
        assert 0 < measured[f"{name}: largest error, in steps"] <= FARTHEST
