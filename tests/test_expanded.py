"""A bundle whose block codes are expanded once gives what the shipped one gives, to the bit."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from workflow_scripts.coreai.bytecode import read_constants
from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.coreai.expanded import expanded
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.model.linear import BlockLinear
from workflow_scripts.model.signature import FunctionSpec, TensorSpec
from workflow_scripts.quantize.weights import Linear

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="a Mac runs what ships")
ROWS, COLUMNS = 64, 96


def block_linear(bits, compute, folder):
    """A bundle of one layer with all codes of its width."""
    numbers = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    codes = numbers.integers(-half, half, (ROWS, COLUMNS)).astype(np.int8)
    codes[0, :2] = -half, half - 1
    steps = np.exp(numbers.normal(size=(ROWS, COLUMNS // 32))).astype(np.float16)
    layer = BlockLinear(Linear(codes, steps, 32, bits), getattr(torch, compute))
    spec = FunctionSpec({"x": TensorSpec(compute, (1, 1, COLUMNS))}, {"y": TensorSpec(compute, (1, 1, ROWS))})
    bundle = folder / "layer.aimodel"
    bundle.mkdir()
    save_bundle([Function("main", nn.Sequential(layer), spec)], bundle, {})
    return bundle


def run(bundle, x):
    with open_bundle(bundle) as loaded:
        return loaded.call("main", {"x": x})["y"]


@pytest.mark.parametrize("compute", ["float16", "float32"])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_values_are_the_same_to_the_bit(bits, compute, tmp_path):
    bundle = block_linear(bits, compute, tmp_path)
    # One column at a time: each output is one weight.
    rows = [np.eye(COLUMNS, dtype=compute)[None, None, column] for column in (0, 1, 31, 32, 95)]
    rows.append(np.random.default_rng(0).normal(size=(1, 1, COLUMNS)).astype(compute))
    expected = [run(bundle, x) for x in rows]
    with expanded(bundle) as folder:
        assert folder != bundle and folder.name == bundle.name
        sizes = {constant.size for constant in read_constants(folder / "main.mlirb")}
        assert ROWS * COLUMNS * np.dtype(compute).itemsize in sizes
        for x, wanted in zip(rows, expected, strict=True):
            np.testing.assert_array_equal(run(folder, x), wanted)
    assert not folder.exists()
