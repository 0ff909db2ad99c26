"""The raw gather dump: exact files, rows within the int8 bound, and a reader that equals plain numpy."""

import hashlib
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
from hypothesis.extra import numpy as hnp

from tests import tiny
from workflow_scripts.checkpoint.safetensors import read_header
from workflow_scripts.errors import UserError
from workflow_scripts.tables.raw import RawTables
from workflow_scripts.tables.writer import quantize_rows, write_raw_tables

ROOT = Path(__file__).parents[1]
EMBED, PER_LAYER = "embed_tokens.weight", "embed_tokens_per_layer.weight"
PROJECTION, PROJECTION_NORM = "per_layer_model_projection.weight", "per_layer_projection_norm.weight"
IDS = np.array([2, 105, 7, 7, 0, 127])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.build_tiny(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    out = tmp_path_factory.mktemp("tables")
    write_raw_tables(checkpoint, out)
    return out


@pytest.fixture
def copy(folder, tmp_path):
    """A dump that a test may damage."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def by_the_formula(rows):
    """Codes and scales of float32 rows, by numpy."""
    scale = np.maximum(np.abs(rows).max(axis=1, keepdims=True) / np.float32(127), np.float32(1e-8))
    return np.clip(np.rint(rows / scale), -127, 127).astype(np.int8), scale


def reference(checkpoint, ids):
    """Embeddings and per-layer inputs in float64 from the checkpoint's values, as in HF's modeling_gemma4.py."""
    config = checkpoint.config
    hidden, size = config.hidden_size, config.hidden_size_per_layer_input
    weight = {
        name: checkpoint.float32(name).astype(np.float64)
        for name in (EMBED, PER_LAYER, PROJECTION, PROJECTION_NORM)
    }
    embeds = weight[EMBED][ids] * hidden**0.5
    tokens = weight[PER_LAYER][ids].reshape(len(ids), -1, size) * size**0.5
    context = (embeds @ weight[PROJECTION].T * hidden**-0.5).reshape(tokens.shape)
    context *= (np.mean(context**2, axis=-1, keepdims=True) + config.rms_norm_eps) ** -0.5
    return embeds, (context * weight[PROJECTION_NORM] + tokens) * 2**-0.5


def within_int8_bound(tables, checkpoint):
    """Whether every stored value lies within half a step (and float32 rounding) of the checkpoint's."""
    pairs = (
        (EMBED, tables.embed_rows, tables.embed_scale),
        (PER_LAYER, tables.per_layer_rows, tables.per_layer_scale),
    )
    for name, rows, scale in pairs:
        step = scale[:, None].astype(np.float64)
        if (np.abs(rows * step - checkpoint.float32(name)) > step * (0.5 + 1e-5)).any():
            return False
    return True


def test_files_and_sizes_are_those_of_the_published_dump(folder, checkpoint):
    config = checkpoint.config
    vocab, hidden, size = config.vocab_size, config.hidden_size, config.hidden_size_per_layer_input
    row = config.num_hidden_layers * size
    assert {file.name: file.stat().st_size for file in folder.iterdir() if file.name != "meta.json"} == {
        "embed_tokens.i8": vocab * hidden,
        "embed_tokens.scale.f32": vocab * 4,
        "embed_per_layer.i8": vocab * row,
        "embed_per_layer.scale.f32": vocab * 4,
        "proj.f32": row * hidden * 4,
        "proj_norm.f32": size * 4,
    }
    assert json.loads((folder / "meta.json").read_text()) == {
        "V": vocab,
        "D": hidden,
        "PLD": row,
        "L": config.num_hidden_layers,
        "ld": size,
        "embed_scale_main": pytest.approx(hidden**0.5, rel=1e-15),
        "embed_scale_pl": pytest.approx(size**0.5, rel=1e-15),
        "proj_scale": pytest.approx(hidden**-0.5, rel=1e-15),
        "input_scale": pytest.approx(2**-0.5, rel=1e-15),
        "rms_eps": config.rms_norm_eps,
        "checkpoint": checkpoint.digest,
    }


def test_bytes_follow_the_documented_float32_formula(folder, checkpoint):
    for name, file in ((EMBED, "embed_tokens"), (PER_LAYER, "embed_per_layer")):
        expected, scale = by_the_formula(checkpoint.float32(name))
        assert (folder / f"{file}.i8").read_bytes() == expected.tobytes()
        assert (folder / f"{file}.scale.f32").read_bytes() == scale.astype("<f4").tobytes()
    assert (folder / "proj.f32").read_bytes() == checkpoint.float32(PROJECTION).tobytes()
    assert (folder / "proj_norm.f32").read_bytes() == checkpoint.float32(PROJECTION_NORM).tobytes()


def test_rows_are_within_the_int8_bound(folder, checkpoint):
    assert within_int8_bound(RawTables.open(folder), checkpoint)


def test_rows_shifted_by_one_are_seen(folder, checkpoint):
    tables = RawTables.open(folder)
    for name in ("embed_rows", "per_layer_rows", "embed_scale", "per_layer_scale"):
        shifted = replace(tables, **{name: np.roll(getattr(tables, name), 1, axis=0)})
        assert not within_int8_bound(shifted, checkpoint)
    shifted = replace(tables, per_layer_rows=np.roll(tables.per_layer_rows, 1, axis=0))
    _, expected = reference(checkpoint, IDS)
    assert np.abs(shifted.per_layer_inputs(IDS, shifted.embed(IDS)) - expected).max() > 0.5


def test_reader_equals_an_independent_computation(folder, checkpoint):
    """What is left is the int8 rounding: half a step of each table, the projection's normalized."""
    tables = RawTables.open(folder)
    embeds, inputs = reference(checkpoint, IDS)
    found = tables.embed(IDS)
    assert found.dtype == np.float32 and found.shape == embeds.shape
    half_step = tables.embed_scale[IDS, None] / 2 * tables.meta.embed_scale_main
    assert (np.abs(found - embeds) <= half_step * (1 + 1e-4)).all()
    found = tables.per_layer_inputs(
        IDS, embeds.astype(np.float32)
    )  # exact embeddings: only the row's own rounding
    assert found.dtype == np.float32 and found.shape == inputs.shape
    half_step = tables.per_layer_scale[IDS, None, None] / 2 * tables.meta.embed_scale_pl * 2**-0.5
    assert (np.abs(found - inputs) <= half_step * (1 + 1e-4) + 1e-5).all()
    assert np.abs(tables.per_layer_inputs(IDS, tables.embed(IDS)) - inputs).max() < 0.1


def test_bytes_do_not_depend_on_block_size(folder, checkpoint, tmp_path):
    for block_values in (1, 1000, 1 << 30):
        out = tmp_path / str(block_values)
        out.mkdir()
        write_raw_tables(checkpoint, out, block_values)
        assert contents(out) == contents(folder)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_bytes_do_not_depend_on_threads(checkpoint, tmp_path, dtype):
    cast = {name: checkpoint.array(name).astype(dtype) for name in (EMBED, PER_LAYER)}
    tiny.write_tensors(tmp_path / "cast.safetensors", cast)
    other = replace(checkpoint, tensors={**checkpoint.tensors, **read_header(tmp_path / "cast.safetensors")})
    for threads in (1, 2, 7):
        out = tmp_path / str(threads)
        out.mkdir()
        write_raw_tables(other, out, 1000, threads)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "7")
    for name, file in ((EMBED, "embed_tokens.i8"), (PER_LAYER, "embed_per_layer.i8")):
        expected, _ = by_the_formula(cast[name].astype(np.float32))
        assert (tmp_path / "7" / file).read_bytes() == expected.tobytes()


def test_bytes_do_not_depend_on_the_processor(folder, checkpoint, tmp_path):
    """Another host: a fresh process that compiles without AVX and fused multiply-add, on two threads."""
    script = (
        "import sys; from pathlib import Path\n"
        "from workflow_scripts.checkpoint.reader import Checkpoint\n"
        "from workflow_scripts.tables.writer import write_raw_tables\n"
        "write_raw_tables(Checkpoint.open(Path(sys.argv[1])), Path(sys.argv[2]), 1000, 2)\n"
    )
    other_host = {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
    }
    out = tmp_path / "tables"
    out.mkdir()
    arguments = [sys.executable, "-c", script, str(checkpoint.source.parent), str(out)]
    subprocess.run(arguments, cwd=ROOT, env=os.environ | other_host, check=True)
    assert contents(out) == contents(folder)


def test_memory_of_a_table_is_that_of_its_blocks(tmp_path):
    """A table of 64 MB on two threads, with its rows neither mapped nor held: in a process of its own."""
    script = """
import re, sys
from pathlib import Path
import numpy as np
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import TensorInfo
from workflow_scripts.tables import writer

def resident():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

folder, shape = Path(sys.argv[1]), (16384, 2048)
info = TensorInfo("BF16", shape, folder / "table", 0, 2 * shape[0] * shape[1])
np.full(shape[0] * shape[1], 0x3F80, np.uint16).tofile(folder / "table")
checkpoint = Checkpoint(None, "", folder, {"t": info})
writer.quantize_rows(np.ones((1, 4), np.float32), "t")
writer.write_rows(checkpoint, "t", "warm", folder, 1 << 17, 2)
Path("/proc/self/clear_refs").write_text("5")
before = resident()
writer.write_rows(checkpoint, "t", "rows", folder, 1 << 17, 2)
print(resident() - before)
"""
    if sys.platform != "linux":
        pytest.skip("the peak is read from /proc")
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 8 << 10
    assert (tmp_path / "rows.i8").read_bytes() == b"\x7f" * (16384 * 2048)


def test_stage_writes_the_same(folder, checkpoint, tmp_path):
    from workflow_scripts.stages import tables as stage
    from workflow_scripts.stages.job import Job

    stage.run(Job({"checkpoint": checkpoint.source.parent}, {}, {}, tmp_path))
    assert contents(tmp_path) == contents(folder)


def test_tables_are_mapped_copy_on_write(folder):
    tables = RawTables.open(folder)
    digest = hashlib.sha256((folder / "embed_tokens.i8").read_bytes()).hexdigest()
    for name in (
        "embed_rows",
        "embed_scale",
        "per_layer_rows",
        "per_layer_scale",
        "projection",
        "projection_norm",
    ):
        assert getattr(tables, name).mode == "c"
    tables.embed_rows[0] = 1
    assert hashlib.sha256((folder / "embed_tokens.i8").read_bytes()).hexdigest() == digest


def test_reader_needs_numpy_only():
    code = "import sys, workflow_scripts.tables.raw; print(sorted({'torch', 'numba'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("wrong", [-1, 128, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(folder, wrong):
    tables = RawTables.open(folder)
    with pytest.raises(UserError, match=f"token id {wrong} is outside"):
        tables.embed(np.array([0, wrong]))
    with pytest.raises(UserError, match=f"token id {wrong} is outside"):
        tables.per_layer_inputs(np.array([0, wrong]), tables.embed(np.array([0, 1])))


@pytest.mark.parametrize(
    "name", ["embed_tokens.i8", "embed_per_layer.scale.f32", "proj.f32", "proj_norm.f32"]
)
def test_a_file_of_wrong_size_or_missing_is_named(copy, name):
    data = (copy / name).read_bytes()
    for content in (data[:-1], data + b"\0"):
        (copy / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} has {len(content)} bytes"):
            RawTables.open(copy)
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        RawTables.open(copy)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda meta: meta.pop("PLD"), "PLD"),
        (lambda meta: meta.update(extra=1), "extra"),
        (lambda meta: meta.update(V="128"), "V is '128'"),
        (lambda meta: meta.update(V=True), "V is True"),
        (lambda meta: meta.update(D=96.0), r"D is 96\.0"),
        (lambda meta: meta.update(rms_eps=float("nan")), "rms_eps is nan"),
        (lambda meta: meta.update(L=0), "L is 0"),
        (lambda meta: meta.pop("checkpoint"), "checkpoint"),
        (lambda meta: meta.update(checkpoint=""), "checkpoint is '', not a digest"),
        (lambda meta: meta.update(checkpoint=7), "checkpoint is 7, not a digest"),
        (
            lambda meta: meta.update(format="int4-b32"),
            "is of tables with format int4-b32, not with int8 rows",
        ),
        (lambda meta: meta.update(L=5), "PLD is 320, not L x ld = 160"),
    ],
)
def test_wrong_meta_is_named(copy, edit, message):
    meta = json.loads((copy / "meta.json").read_text())
    edit(meta)
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match=rf"meta\.json.*{message}"):
        RawTables.open(copy)


def test_missing_or_broken_meta_is_named(copy):
    for content, message in (("[", "is not readable"), ("[]", "holds no JSON object")):
        (copy / "meta.json").write_text(content)
        with pytest.raises(UserError, match=rf"meta\.json {message}"):
            RawTables.open(copy)
    (copy / "meta.json").unlink()
    with pytest.raises(UserError, match=r"has no meta\.json"):
        RawTables.open(copy)


@pytest.mark.parametrize("name", [EMBED, PER_LAYER, PROJECTION, PROJECTION_NORM])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_value_that_is_not_finite_is_refused_by_name(checkpoint, tmp_path, name, bad, dtype):
    values = checkpoint.array(name).astype(dtype)
    values[len(values) - 2 :].reshape(-1)[0] = bad
    tiny.write_tensors(tmp_path / "other.safetensors", {name: values})
    damaged = {**checkpoint.tensors, name: read_header(tmp_path / "other.safetensors")[name]}
    with pytest.raises(UserError, match=rf"{name}, row {len(values) - 2}, holds a value"):
        write_raw_tables(replace(checkpoint, tensors=damaged), tmp_path, 1000, 2)


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=200)
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE))
def test_row_quantizer_keeps_its_bounds(rows):
    quantized, scale = quantize_rows(rows, "t")
    assert quantized.dtype == np.int8 and scale.dtype == np.float32 and scale.shape == (len(rows),)
    assert quantized.min() >= -127 and (scale >= np.float32(1e-8)).all()
    step = scale[:, None].astype(np.float64)
    restored = quantized * step
    assert (np.abs(restored - rows) <= step * (0.5 + 1e-5)).all()
    peaks = np.abs(rows).max(axis=1)
    assert (
        np.abs(quantized).max(axis=1)[peaks >= 1.28e-6] == 127
    ).all()  # the largest value uses the whole range
    assert (quantized[rows == 0] == 0).all()
    expected, formula = by_the_formula(rows)
    np.testing.assert_array_equal(quantized, expected)
    np.testing.assert_array_equal(scale, formula[:, 0])
    negated, same_scale = quantize_rows(-rows, "t")
    np.testing.assert_array_equal(negated, -quantized)
    np.testing.assert_array_equal(same_scale, scale)
    with np.errstate(over="ignore"):
        again = quantized.astype(np.float32) * scale[:, None]
    if np.isfinite(again).all():
        np.testing.assert_array_equal(quantize_rows(again, "t")[0], quantized)


def test_row_quantizer_at_the_extremes():
    largest = np.finfo(np.float32).max
    rows = np.array([[0, 0, 0], [largest, -largest, 0], [1e-45, 0, 0], [127, -127, 0.5]], np.float32)
    quantized, scale = quantize_rows(rows, "t")
    np.testing.assert_array_equal(
        quantized, [[0, 0, 0], [127, -127, 0], [0, 0, 0], [127, -127, 0]]
    )  # rint(0.5) is 0
    np.testing.assert_array_equal(scale, np.array([1e-8, largest / 127, 1e-8, 1], np.float32))
