"""Quantized weights: what is in them, that it is what the recipe says, and that no host or thread count shows."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import tiny
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import read_header
from workflow_scripts.errors import UserError
from workflow_scripts.quantize import encode
from workflow_scripts.quantize.recipes import RECIPES, get_recipe
from workflow_scripts.quantize.weights import Dense, Linear, Palette, Weights
from workflow_scripts.quantize.writer import write_weights
from workflow_scripts.threads import available_threads, in_order

ROOT = Path(__file__).parents[1]
FILES = ["core.safetensors", "head.safetensors", "report.json", "weights.json"]
# The remaining one takes only checkpoints from quantization-aware training.
ANY_CHECKPOINTS = {name: recipe for name, recipe in RECIPES.items() if name != "int4-qat-b32"}
GATE = "layers.1.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.build_tiny(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory, checkpoint):
    """The weights in every recipe, by its name."""
    root = tmp_path_factory.mktemp("weights")
    for recipe in ANY_CHECKPOINTS.values():
        write_weights(checkpoint, recipe, new_folder(root / recipe.name))
    return {name: root / name for name in ANY_CHECKPOINTS}


def new_folder(path):
    path.mkdir()
    return path


def matrices(checkpoint):
    return [
        name
        for name in checkpoint.names()
        if name == "embed_tokens.weight" or (name.startswith("layers.") and len(checkpoint.shape(name)) == 2)
    ]


def with_tensor(checkpoint, folder, name, array):
    """The checkpoint with another content of one tensor."""
    file = folder / "other.safetensors"
    tiny.write_tensors(file, {name: array})
    return replace(checkpoint, tensors={**checkpoint.tensors, name: read_header(file)[name]})


def is_mapped_copy_on_write(array):
    while array is not None and not isinstance(array, np.memmap):
        array = array.base
    return array is not None and array.mode == "c"


def digests(tree):
    return {name: hashlib.sha256((tree / name).read_bytes()).hexdigest() for name in FILES}


@pytest.mark.parametrize("name", ANY_CHECKPOINTS)
def test_files_and_identity(trees, checkpoint, name):
    assert sorted(path.name for path in trees[name].iterdir()) == FILES
    weights = Weights.open(trees[name])
    assert (weights.recipe, weights.config, weights.checkpoint_digest) == (
        name,
        checkpoint.config,
        checkpoint.digest,
    )


@pytest.mark.parametrize("name", ANY_CHECKPOINTS)
def test_core_has_every_layer_tensor_and_head_only_the_embedding(trees, checkpoint, name):
    index = json.loads((trees[name] / "weights.json").read_text())["tensors"]
    tables = {
        "embed_tokens_per_layer.weight",
        "per_layer_model_projection.weight",
        "per_layer_projection_norm.weight",
    }
    assert index.keys() == set(checkpoint.names()) - tables
    assert [tensor for tensor, entry in index.items() if entry["file"] == "head.safetensors"] == [
        "embed_tokens.weight"
    ]
    shared = checkpoint.config.first_shared_layer
    assert f"layers.{shared - 1}.self_attn.k_proj.weight" in index
    assert f"layers.{shared}.self_attn.k_proj.weight" not in index


@pytest.mark.parametrize(("name", "dtype"), [("fp32", np.float32), ("fp16", np.float16)])
def test_dense_recipes_hold_the_rounded_weights(trees, checkpoint, name, dtype):
    weights = Weights.open(trees[name])
    for tensor in matrices(checkpoint):
        stored = weights.linear(tensor)
        assert isinstance(stored, Dense) and is_mapped_copy_on_write(stored.array)
        assert stored.array.dtype == dtype
        np.testing.assert_array_equal(stored.array, checkpoint.float32(tensor).astype(dtype))


def test_palettes(trees, checkpoint):
    weights = Weights.open(trees["int8-kmeans-g32"])
    for tensor in matrices(checkpoint):
        stored, original = weights.linear(tensor), checkpoint.float32(tensor)
        assert isinstance(stored, Palette) and (stored.bits, stored.group_size) == (8, 32)
        assert is_mapped_copy_on_write(stored.indices) and is_mapped_copy_on_write(stored.codebook)
        assert stored.indices.dtype == np.uint8 and stored.indices.shape == original.shape
        assert stored.codebook.dtype == np.float16 and stored.codebook.shape == (len(original) // 32, 256)
        rows = np.arange(len(original))[:, None] // 32
        dequantized = stored.codebook.astype(np.float32)[rows, stored.indices]
        np.testing.assert_array_equal(stored.dequantize(), dequantized)
        assert np.sum((original - dequantized) ** 2) < 6e-5 * np.sum(original**2)


def test_dequantize_gives_any_rows(trees):
    for recipe in ("fp16", "int8-kmeans-g32", "int4-kmeans-g32", "int4-linear-b32"):
        stored = Weights.open(trees[recipe]).linear("embed_tokens.weight")
        whole = stored.dequantize()
        for rows in (slice(5, 7), slice(30, 70), slice(64, 64), slice(100, None)):
            np.testing.assert_array_equal(stored.dequantize(rows), whole[rows])


@pytest.mark.parametrize("name", ANY_CHECKPOINTS)
def test_vectors_stay_float32(trees, checkpoint, name):
    weights = Weights.open(trees[name])
    for tensor in ("norm.weight", "layers.0.layer_scalar", "layers.9.self_attn.q_norm.weight"):
        vector = weights.vector(tensor)
        assert vector.dtype == np.float32 and is_mapped_copy_on_write(vector)
        np.testing.assert_array_equal(vector, checkpoint.float32(tensor))


@pytest.mark.parametrize("name", ANY_CHECKPOINTS)
def test_report_is_true(trees, checkpoint, name):
    report = json.loads((trees[name] / "report.json").read_text())
    weights = Weights.open(trees[name])
    assert report["tensors"].keys() == set(matrices(checkpoint))
    signal = error = 0.0
    for tensor, figures in report["tensors"].items():
        original = checkpoint.float32(tensor).astype(np.float64)
        own = np.sum((original - weights.linear(tensor).dequantize()) ** 2)
        signal, error = signal + np.sum(original**2), error + own
        assert figures["snr_db"] == (round(10 * math.log10(np.sum(original**2) / own), 2) if own else None)
        assert figures["parameters"] == original.size
        assert figures["bits_per_weight"] == round(8 * figures["bytes"] / original.size, 4)
        assert figures["bytes"] == shipped(weights.linear(tensor))
    total = report["total"]
    assert total["snr_db"] == (round(10 * math.log10(signal / error), 2) if error else None)
    assert total["parameters"] == sum(math.prod(checkpoint.shape(tensor)) for tensor in matrices(checkpoint))
    for kind, members in by_kind(checkpoint).items():
        figures = report["kinds"][kind]
        assert figures["bytes"] == sum(shipped(weights.linear(tensor)) for tensor in members)
        assert figures["parameters"] == sum(math.prod(checkpoint.shape(tensor)) for tensor in members)
        assert figures["bits_per_weight"] == round(8 * figures["bytes"] / figures["parameters"], 4)
    assert total["bytes"] == sum(report["kinds"][kind]["bytes"] for kind in ("mlp", "head", "other"))


def shipped(stored):
    """Bytes of a matrix in a bundle: codes in their own width."""
    if isinstance(stored, Dense):
        return stored.array.nbytes
    if isinstance(stored, Linear):
        return stored.codes.size * stored.bits // 8 + stored.steps.nbytes
    return stored.indices.size * stored.bits // 8 + stored.codebook.nbytes


def by_kind(checkpoint):
    names = set(matrices(checkpoint))
    mlp = {name for name in names if name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")}
    head = {"embed_tokens.weight"}
    return {"mlp": mlp, "head": head, "other": names - mlp - head}


def test_the_mixed_recipe_has_4_bits_in_the_mlp_and_the_head_and_float16_elsewhere(trees, checkpoint):
    weights = Weights.open(trees["int4-kmeans-g32"])
    report = json.loads((trees["int4-kmeans-g32"] / "report.json").read_text())
    float16, kinds = Weights.open(trees["fp16"]), by_kind(checkpoint)
    assert len(kinds["mlp"]) == 3 * checkpoint.config.num_hidden_layers
    for name in kinds["mlp"] | kinds["head"]:
        stored = weights.linear(name)
        assert isinstance(stored, Palette) and (stored.bits, stored.group_size) == (4, 32)
        assert stored.indices.max() < 16 and stored.codebook.shape[1] == 16
        assert report["tensors"][name]["encoding"] == {"kind": "palette", "bits": 4, "group_size": 32}
    for name in kinds["other"]:
        stored = weights.linear(name)
        assert isinstance(stored, Dense)
        np.testing.assert_array_equal(stored.array, float16.linear(name).array)
        assert report["tensors"][name]["encoding"] == {"kind": "dense", "dtype": "F16"}
        assert report["tensors"][name]["bits_per_weight"] == 16
    # Per 32 rows of 96 weights at 4 bits, a codebook of 16 x 16 bits.
    assert report["tensors"]["embed_tokens.weight"]["bits_per_weight"] == round(4 + 256 / (32 * 96), 4)


def test_every_kind_of_matrix_has_the_floor_of_its_own_encoding(checkpoint, tmp_path):
    """20 dB are plenty for a 4-bit matrix and far too little for one in float16."""
    values = np.random.default_rng(0).normal(0, 1e-7, (64, 96)).astype(ml_dtypes.bfloat16)
    other = with_tensor(checkpoint, tmp_path, GATE, values)
    write_weights(other, RECIPES["int4-kmeans-g32"], new_folder(tmp_path / "mlp"))
    name = "layers.1.self_attn.o_proj.weight"
    values = np.random.default_rng(0).normal(0, 1e-7, checkpoint.shape(name)).astype(ml_dtypes.bfloat16)
    other = with_tensor(checkpoint, tmp_path, name, values)
    with pytest.raises(UserError, match=rf"{name} keeps .* only 1\d\.\d+ dB .* must keep 44\.0"):
        write_weights(other, RECIPES["int4-kmeans-g32"], new_folder(tmp_path / "other"))


def test_bytes_do_not_depend_on_block_size(trees, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_BLOCK_WEIGHTS", 1)
    for name in ("fp16", "int8-kmeans-g32"):
        write_weights(checkpoint, RECIPES[name], new_folder(tmp_path / name))
        assert digests(tmp_path / name) == digests(trees[name])


@pytest.mark.parametrize("name", ANY_CHECKPOINTS)
def test_bytes_do_not_depend_on_threads(trees, checkpoint, tmp_path, monkeypatch, name):
    monkeypatch.setattr(encode, "_BLOCK_WEIGHTS", 1)  # so that there are blocks for all
    for threads in (1, 2, 7):
        write_weights(checkpoint, RECIPES[name], new_folder(tmp_path / str(threads)), threads)
        assert (
            digests(tmp_path / str(threads))["core.safetensors"] == digests(trees[name])["core.safetensors"]
        )
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "7")


def test_threads_give_results_in_order_and_errors_in_their_place():
    def work(item):
        time.sleep(0.01 if item % 3 == 0 else 0)
        if item == 7:
            raise ValueError("seven")
        return item

    found = []
    with pytest.raises(ValueError, match="seven"):
        found.extend(in_order(work, range(20), 3))
    results = in_order(work, range(7), 3)
    assert list(results) == list(range(7))


@pytest.mark.parametrize(("told", "expected"), [("3", 3), ("1000", 32), ("", None), ("0", None), ("x", None)])
def test_threads_are_what_the_workflow_says_or_all_cores(monkeypatch, told, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    assert available_threads() == (expected or os.cpu_count())


@pytest.mark.parametrize("name", ["fp16", "int8-kmeans-g32", "int4-kmeans-g32", "int8-linear-b32"])
def test_bytes_do_not_depend_on_threads_or_processor(trees, checkpoint, tmp_path, name):
    """Another host: a fresh process that compiles without AVX and fused multiply-add, with numpy's plainest loops."""
    script = (
        "import sys; from pathlib import Path\n"
        "from workflow_scripts.checkpoint.reader import Checkpoint\n"
        "from workflow_scripts.quantize.recipes import RECIPES\n"
        "from workflow_scripts.quantize.writer import write_weights\n"
        "write_weights(Checkpoint.open(Path(sys.argv[1])), RECIPES[sys.argv[2]], Path(sys.argv[3]), 2)\n"
    )
    other_host = {
        "NUMBA_NUM_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "PYTHONHASHSEED": "7",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4",
    }
    tree = checkpoint.source.parent
    out = new_folder(tmp_path / "out")
    subprocess.run(
        [sys.executable, "-c", script, str(tree), name, str(out)],
        check=True,
        cwd=ROOT,
        env={**os.environ, **other_host},
    )
    assert digests(out) == digests(trees[name])


def test_stage_is_the_recipe_of_its_params(trees, checkpoint, tmp_path):
    from workflow_scripts.stages import weights as stage
    from workflow_scripts.stages.job import Job

    out = new_folder(tmp_path / "out")
    stage.run(Job({"checkpoint": checkpoint.source.parent}, {}, {"recipe": "fp16"}, out))
    assert digests(out) == digests(trees["fp16"])


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match=r"`int8-kmean-g32`.*did you mean `int8-kmeans-g32`"):
        get_recipe("int8-kmean-g32")


@pytest.mark.parametrize(
    ("recipe", "values", "message"),
    [
        ("int8-kmeans-g32", np.full((48, 96), 0.5), r"multiple of 32"),
        ("int8-kmeans-g32", np.full((64, 96), np.nan), "not a number"),
        ("fp16", np.full((64, 96), np.inf), "infinite"),
        ("fp32", np.full((64, 96), np.nan), "not a number"),
        ("fp16", np.full((64, 96), 1e6), "beyond the largest float16"),
        ("fp16", np.random.default_rng(0).normal(0, 1e-7, (64, 96)), r"1\d\.\d+ dB.*recipe fp32"),
        ("int8-kmeans-g32", np.random.default_rng(0).normal(0, 1e-7, (64, 96)), r"1\d\.\d+ dB.*recipe fp32"),
        ("int8-kmeans-g32", np.full((64, 96), 1e-12), r"only 0\.0 dB.*recipe fp32"),
        ("int4-linear-b32", np.full((64, 96), 1e-12), r"only 0\.0 dB.*recipe fp32"),
        ("int8-linear-b32", np.full((64, 96), np.nan), "row 0, block 0, .*not a number"),
        ("int8-linear-b32", np.full((64, 80), 0.5), r"columns are a multiple of 32"),
    ],
)
def test_what_a_recipe_cannot_hold_is_refused_by_name(checkpoint, tmp_path, recipe, values, message):
    other = with_tensor(checkpoint, tmp_path, GATE, values.astype(ml_dtypes.bfloat16))
    with pytest.raises(UserError, match=GATE + ".*" + message):
        write_weights(other, RECIPES[recipe], new_folder(tmp_path / "out"))


def test_small_weights_are_kept_where_the_recipe_can(checkpoint, tmp_path):
    values = np.random.default_rng(0).normal(0, 1e-5, (64, 96)).astype(ml_dtypes.bfloat16)
    other = with_tensor(checkpoint, tmp_path, GATE, values)
    original = values.astype(np.float64)
    for name in ANY_CHECKPOINTS:
        write_weights(other, RECIPES[name], new_folder(tmp_path / name))
        stored = Weights.open(tmp_path / name).linear(GATE).dequantize()
        lost = 1e-2 if name.startswith("int4") else 1e-4  # 16 levels keep 20 dB of any normal weights
        assert np.sum((stored - original) ** 2) < lost * np.sum(original**2)


def test_open_names_what_is_wrong(trees, tmp_path):
    with pytest.raises(UserError, match=r"weights\.json"):
        Weights.open(tmp_path)
    (tmp_path / "weights.json").write_text("{")
    with pytest.raises(UserError, match=r"weights\.json is not readable"):
        Weights.open(tmp_path)
    record = json.loads((trees["fp16"] / "weights.json").read_text())
    (tmp_path / "weights.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"core\.safetensors is missing"):
        Weights.open(tmp_path)
    for file in FILES[:2]:
        (tmp_path / file).write_bytes((trees["fp16"] / file).read_bytes())
    Weights.open(tmp_path)
    record["tensors"][GATE]["shape"] = [1, 2]
    (tmp_path / "weights.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=rf"core\.safetensors does not hold {GATE}"):
        Weights.open(tmp_path)


def test_unknown_tensors_are_named(trees):
    weights = Weights.open(trees["fp16"])
    with pytest.raises(UserError, match=r"layers\.77\.mlp"):
        weights.linear("layers.77.mlp.gate_proj.weight")
    with pytest.raises(UserError, match=r"norm\.weight"):
        weights.linear("norm.weight")
    with pytest.raises(UserError, match="embed_tokens"):
        weights.vector("embed_tokens.weight")


def test_digest_of_inputs_is_kept_for_unpruned_layouts(tmp_path):
    """Dead K/V tensors of shared layers change nothing: the weights are the same bytes."""
    trees = []
    for unpruned in (False, True):
        root = new_folder(tmp_path / str(unpruned))
        opened = tiny.build_tiny(root, unpruned=unpruned)
        assert isinstance(opened, Checkpoint)
        write_weights(opened, RECIPES["fp16"], new_folder(root / "out"))
        trees.append(root / "out")
    assert digests(trees[0]) == digests(trees[1])
