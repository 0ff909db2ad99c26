"""Reproducible saving at the real model's widths, and the converter's traps that our graphs could step into."""

import os
import subprocess
import sys

import pytest

from tests.child_functions import say_at_shutdown
from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.isolated import ChildDied, isolated
from workflow_scripts.errors import UserError
from workflow_scripts.gates import runs
from workflow_scripts.gates.structure import content_name

# One layer at E2B's widths: norms of 1536 elements show what constants under 256 hide.
WIDE = """
import sys, pathlib, torch, numpy as np
if sys.argv[2] == "other":  # another import order and other objects before it
    import scipy.optimize, transformers
    kept = [object() for _ in range(1000)]
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.linear import PaletteLinear
from workflow_scripts.model.norm import RMSNorm, as_dtype
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.quantize.weights import Palette

class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        numbers = np.random.default_rng(0)
        codes = numbers.integers(0, 256, (256, 1536), np.uint8)
        book = np.sort(numbers.normal(0, 0.02, (8, 256)).astype(np.float16), 1)
        self.norm = RMSNorm(torch.from_numpy(numbers.normal(1, 0.1, 1536).astype(np.float32)), 1e-6)
        self.post = RMSNorm(torch.from_numpy(numbers.normal(1, 0.1, 256).astype(np.float32)), 1e-6)
        self.proj, self.dtype = PaletteLinear(Palette(codes, book, 32, 8), dtype), dtype
    def forward(self, x, mask):
        y = as_dtype(self.post(self.proj(as_dtype(self.norm(x), self.dtype))), self.dtype)[None]
        return torch.nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask, scale=1.0)

out = pathlib.Path(sys.argv[1])
for dtype in ("float16", "float32"):
    (out / f"{dtype}.aimodel").mkdir(parents=True)
    spec = FunctionSpec(
        {"x": TensorSpec(dtype, (1, 2, 1536)), "mask": TensorSpec(dtype, (1, 1, 2, 2))},
        {"y": TensorSpec(dtype, (1, 1, 2, 256))},
    )
    save_bundle([Function("main", Layer(getattr(torch, dtype)), spec)], out / f"{dtype}.aimodel", {"form": "test"})
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The same bundles from two processes with other hash seeds and other imports before the conversion."""
    folders = []
    for kind, seed in (("plain", "1"), ("other", "2")):
        folder = tmp_path_factory.mktemp(kind)
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", WIDE, str(folder), kind]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        folders.append(folder)
    return folders


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_two_processes_write_the_same_bytes(wide, dtype):
    for name in ("main.mlirb", "main.hash", "metadata.json"):
        first, second = [(folder / f"{dtype}.aimodel" / name).read_bytes() for folder in wide]
        assert first == second, name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_constant_escapes_content_naming(wide, dtype):
    program = wide[0] / f"{dtype}.aimodel/main.mlirb"
    data, constants = program.read_bytes(), read_constants(program)
    assert len(constants) >= 4  # codes, codebook, two norms
    for constant in constants:
        assert content_name(data[constant.offset : constant.offset + constant.size]) == constant.name


def test_a_damaged_program_is_an_error_and_not_the_end(wide, tmp_path):
    """Loading a truncated program aborts its process; the caller gets a message."""
    bundle = tmp_path / "cut.aimodel"
    bundle.mkdir()
    for path in (wide[0] / "float16.aimodel").iterdir():
        data = path.read_bytes()
        (bundle / path.name).write_bytes(data[: len(data) // 2] if path.name == "main.mlirb" else data)
    with pytest.raises(ChildDied, match="the process that ran the bundle"):
        isolated(runs.describe, bundle=str(bundle))
    with pytest.raises(UserError, match=r"main\.mlirb is damaged"):
        read_constants(bundle / "main.mlirb")


def test_a_folder_that_is_no_bundle_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no \.aimodel folder"):
        isolated(runs.describe, bundle=str(tmp_path))


def test_a_child_describes_a_bundle(wide):
    assert set(isolated(runs.describe, bundle=str(wide[0] / "float32.aimodel"))) == {
        "main/input/0/x/float32",
        "main/input/1/mask/float32",
        "main/output/0/y/float32",
    }


def test_a_child_ends_without_shutting_its_interpreter_down(tmp_path):
    """The runtime's threads must not meet a shutdown (SIGABRT in one of a hundred runs on a busy host)."""
    note = tmp_path / "note"
    assert isolated(say_at_shutdown, note=str(note)) == {}
    assert not note.exists()


def test_another_toolchain_is_refused(monkeypatch):
    """Private names were checked with one version; another one must not be used silently."""
    import importlib.metadata

    from workflow_scripts.coreai import private

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(UserError, match=r"coreai-core 9\.9 is installed.*make environment"):
        private._check_versions()


def test_stock_names_are_back_after_a_conversion():
    from secrets import choice

    import coreai.authoring.func as func

    from workflow_scripts.coreai import private

    with private.reproducible_names():
        letters = ["".join(func.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(8)) for _ in range(1000)]
    assert len(set(letters)) == 1000  # the stand-in never repeats a name
    assert func.choice is choice


def test_a_graph_that_would_be_miscompiled_is_refused(tmp_path):
    """13 // 8 * 8 is 8, but the converted graph says 13."""
    import torch

    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.model.signature import FunctionSpec, TensorSpec

    class Rounded(torch.nn.Module):
        def forward(self, position):
            return torch.div(position, 8, rounding_mode="trunc") * 8

    spec = FunctionSpec({"p": TensorSpec("int32", (1, 1))}, {"q": TensorSpec("int32", (1, 1))})
    with pytest.raises(ValueError, match="truncating integer division"):
        save_bundle([Function("main", Rounded(), spec)], tmp_path, {})
