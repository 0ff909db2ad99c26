"""On a host without Metal the very bundles with Metal kernels run, from the kernels' references."""

import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from coreai_torch import TorchMetalKernel

from tests.kernel_inputs import (
    CODES,
    HEADS,
    MATVECS,
    PAIRS,
    WIDTHS,
    allowed,
    packed,
    palette,
    random_codes,
    tied_head,
)
from workflow_scripts.coreai import kernel_twin, private
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.coreai.kernel_twin import build_twin, saved_twin
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.kernels import palette_matvec_int4, palette_matvec_int8
from workflow_scripts.kernels.binding import THREAD_PARAMETERS, KernelHead, KernelMatvec
from workflow_scripts.kernels.packing import pack
from workflow_scripts.model.linear import PaletteLinear
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.quantize.weights import Palette

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="this host runs the kernels themselves")

DTYPES = ("float16", "float32")


class Case(NamedTuple):
    """A function of the bundle under test: its layer, the palette in it, and an input."""

    layer: torch.nn.Module
    stored: Palette
    x: np.ndarray


def equal_rows(bits):
    """Every row of every group is the same, so all scores are equal."""
    row = random_codes(bits, 1, 288, seed=4)
    book = np.sort(np.random.default_rng(4).normal(0, 0.1, 1 << bits).astype(np.float16))
    return Palette(np.tile(row, (64, 1)).astype(np.uint8), np.tile(book, (2, 1)), 32, bits)


def few(bits):
    """So few codes that they stand in the program's text; and entries below 6.1e-5, the smallest normal float16.

    The runtime takes such entries for zero where it computes with float16 constants (measured).
    """
    stored = palette(random_codes(bits, 32, 32), bits)
    return replace(stored, codebook=(stored.codebook * np.float32(2e-4)).astype(np.float16))


def matvec(stored, dtype):
    x = np.random.default_rng(5).normal(0, 1, stored.indices.shape[1]).astype(dtype)
    return Case(KernelMatvec(MATVECS[stored.bits].KERNEL, packed(stored)), stored, x)


def head(stored, x):
    return Case(KernelHead(HEADS[stored.bits].KERNEL, packed(stored)), stored, x)


def all_cases():
    """Every kernel in both compute types; codes and codebooks as resources, and uniform or few, as part of the text."""
    random_x = np.random.default_rng(6).normal(0, 1, 288).astype(np.float32)
    cases = {}
    for bits in WIDTHS:
        cases |= {
            f"wide_{bits}_{dtype}": matvec(palette(CODES["wide"](bits), bits), dtype) for dtype in DTYPES
        }
        cases[f"few_{bits}"] = matvec(few(bits), "float32")
        cases[f"max_{bits}"] = matvec(palette(CODES["all max"](bits), bits), "float32")
        stored, hidden = tied_head(bits)
        cases |= {f"tied_{bits}_{dtype}": head(stored, hidden.astype(dtype)) for dtype in DTYPES}
        cases[f"equal_{bits}"] = head(equal_rows(bits), random_x)
    return cases


def spec_of(case):
    rows, columns = case.stored.indices.shape
    x = {"x": TensorSpec(str(case.x.dtype), (1, 1, columns))}
    if isinstance(case.layer, KernelMatvec):
        return FunctionSpec(x, {"y": TensorSpec(str(case.x.dtype), (1, 1, rows))})
    tiles = (rows // 8,)
    return FunctionSpec(x, {"values": TensorSpec("float32", tiles), "indices": TensorSpec("int32", tiles)})


def kernels():
    return [module.KERNEL for module in (*MATVECS.values(), *HEADS.values())]


@pytest.fixture(scope="module")
def cases():
    return all_cases()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, cases):
    """One bundle with a function for each case."""
    path = tmp_path_factory.mktemp("kernels") / "cases.aimodel"
    path.mkdir()
    functions = [Function(name, case.layer, spec_of(case)) for name, case in cases.items()]
    save_bundle(functions, path, {}, kernels())
    return path


@pytest.fixture(scope="module")
def outputs(bundle, cases):
    """Case -> what the runtime of this host gives for it."""
    with open_bundle(bundle) as loaded:
        return {name: loaded.call(name, {"x": case.x[None, None]}) for name, case in cases.items()}


def save(layer, path, rows, columns, kernel):
    path.mkdir()
    spec = FunctionSpec(
        {"x": TensorSpec("float32", (1, 1, columns))}, {"y": TensorSpec("float32", (1, 1, rows))}
    )
    save_bundle([Function("main", layer, spec)], path, {}, [kernel])
    return path


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Kernel name -> a bundle that calls a kernel of this name on 4-bit words and codebook [N / 32, 16]."""
    home = tmp_path_factory.mktemp("foreign")
    kernel = TorchMetalKernel(
        name="foreign_matvec_int4",
        input_names=["X", "W", "CODEBOOK"],
        result_names=["Y"],
        src=palette_matvec_int4.KERNEL.src,
        torch_defn=palette_matvec_int4.reference,
        metal_params=THREAD_PARAMETERS,
    )
    layer = KernelMatvec(kernel, packed(palette(random_codes(4), 4)))
    unknown = save(layer, home / "unknown.aimodel", 64, 96, kernel)
    # Torch knows one kernel of a name, so the other bundle is renamed; the names have the same length.
    changed = home / "changed.aimodel"
    shutil.copytree(unknown, changed)
    program = (unknown / "main.mlirb").read_bytes()
    (changed / "main.mlirb").write_bytes(program.replace(b"foreign_matvec_int4", b"palette_matvec_int8"))
    return {"foreign_matvec_int4": unknown, "palette_matvec_int8": changed}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("case", ["wide_{}_float16", "wide_{}_float32", "few_{}", "max_{}"])
def test_a_matvec_gives_its_reference(outputs, cases, case, bits):
    """Two float32 sums, each rounded once to the output's type: each is within `allowed` of the exact value."""
    name = case.format(bits)
    layer, stored, x = cases[name]
    expected = layer(torch.from_numpy(x)[None, None])[0, 0].numpy()
    found = outputs[name]["y"][0, 0]
    assert found.dtype == expected.dtype and np.abs(expected).max() > 0
    difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    assert (difference <= 2 * allowed(stored, x, str(x.dtype))).all()


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_row_wins_a_tie_of_each_pair_of_rows(outputs, cases, bits, dtype):
    name = f"tied_{bits}_{dtype}"
    layer, stored, x = cases[name]
    found = outputs[name]
    assert found["indices"][: len(PAIRS)].tolist() == [tile * 8 + pair[0] for tile, pair in enumerate(PAIRS)]
    assert (found["values"][: len(PAIRS)] == stored.codebook[np.arange(len(PAIRS)) // 4, -1]).all()
    values, indices = layer(torch.from_numpy(x)[None, None])
    assert found["values"].tolist() == values.tolist() and found["indices"].tolist() == indices.tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_lowest_row_wins_among_rows_that_are_all_equal(outputs, cases, bits):
    _, stored, x = cases[f"equal_{bits}"]
    found = outputs[f"equal_{bits}"]
    assert found["indices"].tolist() == list(range(0, 64, 8))
    exact = stored.dequantize().astype(np.float64) @ x
    assert (np.abs(found["values"] - exact[::8]) <= allowed(stored, x, "float32")[::8]).all()


def test_large_matrices_are_expanded_in_blocks_to_the_same_result(bundle, outputs, cases, monkeypatch):
    # Two palette groups of the narrow cases, one of the wide; and expanded in each call, as large matrices are.
    monkeypatch.setattr(kernel_twin, "_BLOCK", 2 * 32 * 96)
    monkeypatch.setattr(kernel_twin, "_EXPANDED_ONCE", 0)
    text = str(private.mlir_module(build_twin(bundle).program))
    assert "tensor<64x96xui4>" in text and "tensor<32x288xui8>" in text
    assert "tensor<96x288" not in text and "tensor<224x96" not in text
    with open_bundle(bundle) as loaded:
        for name, case in cases.items():
            for output, values in loaded.call(name, {"x": case.x[None, None]}).items():
                np.testing.assert_array_equal(values, outputs[name][output], err_msg=f"{name} {output}")


class PaletteThenKernel(torch.nn.Module):
    """A palette that the program expands itself, as those beside the kernels of a core, and a kernel behind it."""

    def __init__(self, bits, dtype):
        super().__init__()
        self.plain = PaletteLinear(palette(random_codes(bits, 64, 96), bits), getattr(torch, dtype))
        self.kernel = matvec(palette(random_codes(bits, 32, 64), bits), dtype).layer

    def forward(self, x):
        return self.kernel(self.plain(x))


@pytest.mark.parametrize(("bits", "dtype"), [(8, "float16"), (4, "float32")])
def test_small_palettes_beside_the_kernels_are_expanded_once_to_the_same_result(
    tmp_path, monkeypatch, bits, dtype
):
    x = np.random.default_rng(9).normal(0, 1, (1, 1, 96)).astype(dtype)
    spec = FunctionSpec({"x": TensorSpec(dtype, (1, 1, 96))}, {"y": TensorSpec(dtype, (1, 1, 32))})
    save_bundle([Function("main", PaletteThenKernel(bits, dtype), spec)], tmp_path, {}, kernels())
    found = []
    for limit, look_ups in ((kernel_twin._EXPANDED_ONCE, 0), (0, 2)):
        monkeypatch.setattr(kernel_twin, "_EXPANDED_ONCE", limit)
        assert str(private.mlir_module(build_twin(tmp_path).program)).count("lut_to_dense") == look_ups
        with open_bundle(tmp_path) as loaded:
            found.append(loaded.call("main", {"x": x})["y"])
    np.testing.assert_array_equal(*found)


def test_the_interface_is_the_bundles_own(bundle, cases):
    with open_bundle(bundle) as loaded:
        assert loaded.kernels == len(cases)
        assert loaded.functions == sorted(cases)
        for name, case in cases.items():
            found, wanted = loaded.spec(name), spec_of(case)
            assert found == wanted
            assert list(found.outputs) == list(wanted.outputs)


def test_a_large_twin_holds_each_matrix_of_codes_once_and_nothing_of_metal(bundle, cases, monkeypatch):
    monkeypatch.setattr(kernel_twin, "_EXPANDED_ONCE", 0)
    twin = build_twin(bundle)
    counts = {name: twin.kernels.count(name) for name in twin.kernels}
    assert counts == {f"palette_matvec_int{bits}": 4 for bits in WIDTHS} | {
        f"head_argmax_int{bits}": 3 for bits in WIDTHS
    }
    assert private.kernel_operations(twin.program) == []
    text = str(private.mlir_module(twin.program))
    assert "metal" not in text and "coreaix" not in text
    with saved_twin(twin, bundle) as folder:
        data, constants = (folder / "main.mlirb").read_bytes(), read_constants(folder / "main.mlirb")
    stored = [data[constant.offset : constant.offset + constant.size] for constant in constants]
    for name, case in cases.items():
        assert stored.count(pack(case.stored.indices, case.stored.bits).tobytes()) == 1, name


def test_kernels_may_follow_each_other_and_share_a_matrix(tmp_path):
    stored = palette(random_codes(4, 64, 64), 4)
    layer = KernelMatvec(palette_matvec_int4.KERNEL, packed(stored))
    path = save(
        torch.nn.Sequential(layer, layer), tmp_path / "twice.aimodel", 64, 64, palette_matvec_int4.KERNEL
    )
    x = np.random.default_rng(8).normal(0, 1, (1, 1, 64)).astype(np.float32)
    with open_bundle(path) as loaded:
        assert loaded.kernels == 2
        found = loaded.call("main", {"x": x})["y"]
    weight = stored.dequantize().astype(np.float64)
    once = allowed(stored, x[0, 0], "float32")
    bound = np.abs(weight) @ once + allowed(stored, weight @ x[0, 0], "float32")
    assert (np.abs(found[0, 0] - weight @ (weight @ x[0, 0])) <= bound).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "foreign_matvec_int4",
            r"unknown.aimodel calls the Metal kernel foreign_matvec_int4, .*no reference",
        ),
        ("palette_matvec_int8", r"palette_matvec_int8 on .*64x12xsi32.*2x16xf16.*\[N / 32, 256\]"),
    ],
)
def test_a_kernel_without_a_reference_is_refused(foreign, name, message, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match=message), open_bundle(foreign[name]):
        pass
    assert not list(tmp_path.iterdir())


def test_the_log_says_once_what_runs_instead(bundle, cases, caplog):
    with caplog.at_level(logging.INFO), open_bundle(bundle) as loaded:
        for name in ("wide_8_float32", "wide_4_float32"):
            loaded.call(name, {"x": cases[name].x[None, None]})
    said = [record.getMessage() for record in caplog.records if "Metal" in record.getMessage()]
    calls = "3 x head_argmax_int4, 3 x head_argmax_int8, 4 x palette_matvec_int4, 4 x palette_matvec_int8"
    assert said == [f"cases.aimodel: this host has no Metal, reference operators run in place of {calls}"]


def test_nothing_of_a_twin_is_left_behind(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_bundle(bundle):
        assert not list(tmp_path.rglob("main.mlirb"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="few_4"), open_bundle(bundle) as loaded:
        loaded.call("few_4", {})
    assert not list(tmp_path.iterdir())


def test_too_little_space_for_a_twin_is_said_before_it_is_written(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(kernel_twin, "_EXPANDED_ONCE", 0)
    size = (bundle / "main.mlirb").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2 * size - 1))
    with pytest.raises(UserError, match=rf"needs {2 * size:,} bytes in .*TMPDIR"), open_bundle(bundle):
        pass
    assert not list(tmp_path.iterdir())


def test_where_metal_runs_the_kernels_the_bundle_is_opened_as_it_is(bundle, monkeypatch):
    """Here the runtime then refuses the kernel."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with open_bundle(bundle) as loaded:
        assert loaded.kernels == 0
        with pytest.raises(RuntimeError, match="metal4_kernel"):
            loaded.spec("few_4")


def test_a_bundle_without_kernels_has_no_twin(tmp_path, caplog):
    path = save(torch.nn.Identity(), tmp_path / "plain.aimodel", 64, 64, palette_matvec_int8.KERNEL)
    assert build_twin(path).kernels == []
    with caplog.at_level(logging.INFO), open_bundle(path) as loaded:
        assert loaded.kernels == 0
    assert not [record for record in caplog.records if "Metal" in record.getMessage()]
