"""The kernels' references against numpy, and the bundles that embed the kernels.

The Metal source itself is read back and executed elsewhere; here it is only seen to be in the bundle, as written.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from coreai.authoring.asset import AIModelAsset

from tests.kernel_inputs import (
    CODES,
    HEADS,
    MATVECS,
    PAIRS,
    WIDTHS,
    allowed,
    packed,
    palette,
    random_checkpoint,
    tied_head,
)
from tests.tiny import Dims
from workflow_scripts import closure
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.coreai import private
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.host_cache import HostCache
from workflow_scripts.coreai.kernel_twin import build_twin
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.gates.structure import content_name
from workflow_scripts.kernels import head_argmax_int8, palette_matvec_int4, palette_matvec_int8
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec
from workflow_scripts.kernels.packing import pack
from workflow_scripts.kernels.partials import chosen_token
from workflow_scripts.manifest import manifest_path, verify_tree
from workflow_scripts.model.metal_core import metal_core
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import hostcache_metal, signature
from workflow_scripts.quantize.weights import Palette, Weights
from workflow_scripts.scratch import Scratch

RECIPES = {8: "int8-kmeans-g32", 4: "int4-kmeans-g32"}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES.keys())
def test_the_matvec_reference_equals_numpy(bits, dtype, codes):
    stored = palette(codes(bits), bits)
    x = np.random.default_rng(7).normal(0, 1, stored.indices.shape[1]).astype(dtype)
    found = KernelMatvec(MATVECS[bits].KERNEL, packed(stored))(torch.from_numpy(x)[None, None])
    assert found.shape == (1, 1, len(stored.indices)) and found.numpy().dtype == dtype
    expected = stored.dequantize().astype(np.float64) @ x.astype(np.float64)
    assert (np.abs(found[0, 0].numpy() - expected) <= allowed(stored, x, dtype)).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_lowest_row_wins_every_tie_of_a_tile(bits):
    stored, hidden = tied_head(bits)
    values, indices = KernelHead(HEADS[bits].KERNEL, packed(stored))(torch.from_numpy(hidden)[None, None])
    expected = [tile * 8 + pair[0] for tile, pair in enumerate(PAIRS)]
    assert values.dtype == torch.float32 and indices.dtype == torch.int32
    assert indices[: len(PAIRS)].tolist() == expected
    assert values[: len(PAIRS)].tolist() == [
        float(stored.codebook[tile // 4, -1]) for tile in range(len(PAIRS))
    ]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES.keys())
def test_the_head_reference_chooses_as_numpy(bits, codes):
    stored = palette(codes(bits), bits)
    hidden = np.random.default_rng(7).normal(0, 1, stored.indices.shape[1]).astype(np.float32)
    values, indices = KernelHead(HEADS[bits].KERNEL, packed(stored))(torch.from_numpy(hidden)[None, None])
    scores = stored.dequantize().astype(np.float64) @ hidden
    bound = allowed(stored, hidden, "float32")
    largest = scores.reshape(-1, 8).max(1)
    assert (np.abs(values.numpy() - largest) <= bound.reshape(-1, 8).max(1)).all()
    assert (np.abs(scores[indices.numpy()] - largest) <= 2 * bound[indices.numpy()]).all()
    assert (indices.numpy() // 8 == np.arange(len(scores) // 8)).all()


def test_the_host_takes_the_first_of_equal_tiles():
    values = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    assert chosen_token(values, np.array([5, 12, 16, 31], np.int32)) == 12
    assert chosen_token(np.full(4, -2.0, np.float32), np.array([5, 12, 16, 31], np.int32)) == 5


@pytest.fixture(scope="module")
def weights(tmp_path_factory, run_stage):
    """Recipe -> weights (result folders) of a random model with one layer of each type."""
    dims = Dims(layer_types=(SLIDING, FULL), num_kv_shared_layers=0, use_double_wide_mlp=False)
    root = tmp_path_factory.mktemp("model")
    inputs = random_checkpoint(run_stage, root, "kernels", dims)
    recipes = ("fp16", *RECIPES.values())
    return {recipe: run_stage("weights", f"kernels_{recipe}", inputs, recipe=recipe) for recipe in recipes}


@pytest.fixture(scope="module")
def bundles(weights, run_stage):
    """`core4`, `head8`, ... -> bundle; `core4` computes in float32, the others in float16."""

    def export(kind, bits, **params):
        inputs = {"weights": manifest_path(weights[RECIPES[bits]])}
        return run_stage(f"export_metal_{kind}_int{bits}", f"{kind}{bits}.aimodel", inputs, **params)

    return {
        "core8": export("core", 8, compute="fp16", context=8),
        "core4": export("core", 4, compute="fp32", context=8),
        "head8": export("head", 8, compute="fp16"),
        "head4": export("head", 4, compute="fp16"),
    }


def kernel_calls(bundle):
    return private.kernel_operations(AIModelAsset.load(bundle).program)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_core_calls_the_kernel_for_each_mlp_matrix(bundles, bits):
    calls = kernel_calls(bundles[f"core{bits}"])
    source = MATVECS[bits].KERNEL.src
    assert source == (closure.PACKAGE / f"kernels/palette_matvec_int{bits}.metal").read_text()
    assert [call.name for call in calls] == [f"palette_matvec_int{bits}_aaaaaaaa"] * 6
    assert all(source in call.source for call in calls)
    assert {call.threadgroup for call in calls} == {(32, 8, 1)}
    up, down = (32, 64 // 4, 1), (32, 96 // 4, 1)
    assert sorted(call.grid for call in calls) == [up] * 4 + [down] * 2
    assert (bundles[f"core{bits}"] / "main.mlirb").read_bytes().count(source.encode()) == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="this host runs the kernels themselves")
@pytest.mark.parametrize("bits", WIDTHS)
def test_the_twin_of_a_core_has_ordinary_operators_for_every_kernel(bundles, bits):
    twin = build_twin(bundles[f"core{bits}"])
    assert twin.kernels == [f"palette_matvec_int{bits}"] * 6
    assert private.kernel_operations(twin.program) == []
    with open_bundle(bundles[f"core{bits}"]) as bundle:
        assert bundle.kernels == 6


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_head_is_one_kernel_call(bundles, bits):
    (call,) = kernel_calls(bundles[f"head{bits}"])
    assert call.name == f"head_argmax_int{bits}_aaaaaaaa"
    assert HEADS[bits].KERNEL.src in call.source
    assert (call.grid, call.threadgroup) == ((32, 128 // 8, 1), (32, 4, 1))


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_is_stored_once_in_its_width_under_the_name_of_its_content(bundles, weights, bits):
    stored = Weights.open(weights[RECIPES[bits]])
    names = [name for name in stored.index if ".mlp." in name]
    for kind, wanted in (("core", names), ("head", [HEAD_WEIGHT])):
        program = bundles[f"{kind}{bits}"] / "main.mlirb"
        data, constants = program.read_bytes(), read_constants(program)
        for constant in constants:
            assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name
        found = [constant.name for constant in constants]
        for name in wanted:
            assert found.count(content_name(pack(stored.linear(name).indices, bits).tobytes())) == 1, name


@pytest.mark.parametrize(
    ("name", "form", "compute"),
    [
        ("core8", "hostcache_metal", "fp16"),
        ("core4", "hostcache_metal", "fp32"),
        ("head8", "head_argmax_metal", "fp16"),
        ("head4", "head_argmax_metal", "fp16"),
    ],
)
def test_the_interface_is_the_published_one(bundles, weights, name, form, compute):
    wanted = signature(form, Weights.open(weights["fp16"]).config, 8, compute)
    with open_bundle(bundles[name]) as bundle:
        found = {function: bundle.spec(function) for function in bundle.functions}
    assert found == wanted
    assert list(found["main"].inputs) == list(wanted["main"].inputs)
    assert list(found["main"].outputs) == list(wanted["main"].outputs)


@torch.no_grad()
def test_a_core_in_the_runtime_equals_the_kernels_reference(bundles, weights, tmp_path):
    """Position by position: the bundle in the runtime of this host, and its graph in torch."""
    stored = Weights.open(weights[RECIPES[4]])
    scratch = Scratch(tmp_path)
    core = metal_core(stored, palette_matvec_int4.linears(stored, scratch), torch.float32, scratch)
    spec = hostcache_metal(stored.config, 8, "fp32")["main"]
    numbers = np.random.default_rng(11)
    cache = HostCache(spec, stored.config.sliding_window)
    with open_bundle(bundles["core4"]) as bundle:
        for _ in range(3):
            front = {
                name: numbers.normal(0, 1, spec.inputs[name].shape).astype(np.float32)
                for name in ("inputs_embeds", "per_layer_inputs")
            }
            arrays = front | cache.inputs()
            expected = core(*(torch.from_numpy(arrays[name]) for name in spec.inputs))
            found = bundle.call("main", arrays)
            for name, value in zip(spec.outputs, expected, strict=True):
                np.testing.assert_allclose(found[name], value.numpy(), rtol=0, atol=1e-4, err_msg=name)
            cache.store(found)


def test_another_process_writes_the_same_bytes(bundles, weights, tmp_path):
    output = tmp_path / "core4.aimodel.manifest.json"
    inputs = f"weights={manifest_path(weights[RECIPES[4]])}"
    stage = ["stage", "export_metal_core_int4", "--input", inputs, "--output", str(output)]
    options = ["--params", '{"compute": "fp32", "context": 8}', "--log", str(tmp_path / "log")]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-m", "workflow_scripts", *stage, *options], check=True, env=environment)
    assert verify_tree(output).digest == verify_tree(manifest_path(bundles["core4"])).digest


def test_a_matrix_that_does_not_suit_is_named(weights, tmp_path):
    name = "layers.0.mlp.gate_proj.weight"
    opened = {recipe: Weights.open(tree) for recipe, tree in weights.items()}
    for recipe, linears in (
        ("fp16", palette_matvec_int8.linears),
        (RECIPES[4], palette_matvec_int8.linears),
        (RECIPES[8], palette_matvec_int4.linears),
    ):
        with pytest.raises(UserError, match=rf"{name} is stored in recipe {recipe}.*palettes of"):
            linears(opened[recipe], Scratch(tmp_path))(name)


@pytest.mark.parametrize("shape", [(48, 96), (64, 80)])
def test_a_shape_that_does_not_suit_is_named(monkeypatch, weights, shape, tmp_path):
    stored = Palette(np.zeros(shape, np.uint8), np.zeros((2, 256), np.float16), 32, 8)
    monkeypatch.setattr(Weights, "linear", lambda self, name: stored)
    with pytest.raises(UserError, match=rf"{HEAD_WEIGHT} has the shape \[{shape[0]}, {shape[1]}\].*of 32"):
        head_argmax_int8.head(Weights.open(weights["fp16"]), HEAD_WEIGHT, Scratch(tmp_path))


def test_a_kernel_belongs_to_the_one_stage_that_embeds_it():
    stages = [path.stem for path in (closure.PACKAGE / "stages").glob("export_*.py")]
    for kernel in ("palette_matvec_int8", "palette_matvec_int4", "head_argmax_int8", "head_argmax_int4"):
        form, kind = "core" if "matvec" in kernel else "head", kernel[-4:]
        for file in (f"{kernel}.metal", f"{kernel}.py"):
            users = {
                stage
                for stage in stages
                if closure.PACKAGE / "kernels" / file in closure.stage_sources(stage)
            }
            assert users == {f"export_metal_{form}_{kind}"}
