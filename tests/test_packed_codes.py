"""4-bit codes on their way into a bundle: packed as the converter packs them, without memory of their own."""

import os
import sys
from functools import partial

import numpy as np
import pytest
import torch
from coreai_torch._compression import _intx
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_scripts import scratch
from workflow_scripts.coreai import packed_codes, private
from workflow_scripts.kernels.packing import pack, packed_in
from workflow_scripts.scratch import Scratch
from workflow_scripts.usage import processes


def on_disk(folder):
    return private.packing_by(partial(packed_codes.PackedOnDisk, Scratch(folder)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5000), st.booleans(), st.integers(0, 1 << 30))
def test_packed_as_the_converter_packs(tmp_path_factory, size, signed, seed):
    values = np.random.default_rng(seed).integers(-8 if signed else 0, 8 if signed else 16, size)
    codes = torch.from_numpy(values.astype(np.int8 if signed else np.uint8))
    name = "pack_intx" if signed else "pack_uintx"
    expected = getattr(_intx, name)(codes, 4)
    with on_disk(tmp_path_factory.getbasetemp()):
        packed = getattr(_intx, name)(codes, 4)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, expected)


def test_many_tensors_keep_apart_across_blocks_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_codes, "_CODES_AT_ONCE", 1000)
    monkeypatch.setattr(scratch, "_FILE_BYTES", 4000)
    random = np.random.default_rng(0)
    tensors = [
        torch.from_numpy(random.integers(-8, 8, size).astype(np.int8))
        for size in (300, 1001, 9999, 20000, 257)
    ]
    expected = [_intx.pack_intx(codes, 4) for codes in tensors]
    with on_disk(tmp_path):
        packed = [_intx.pack_intx(codes, 4) for codes in tensors]
        again = [_intx.pack_intx(codes, 4) for codes in tensors]
    for made, second, wanted in zip(packed, again, expected, strict=True):
        assert torch.equal(made, wanted)
        assert second.data_ptr() == made.data_ptr()  # for another function: not packed again
    assert list(tmp_path.iterdir()) == []


def test_packing_takes_no_memory(tmp_path):
    """32 MiB of codes, read from a file as the weights are: the converter takes 16 MiB for what it packs."""
    if sys.platform != "linux":
        pytest.skip("this system does not tell anonymous memory from files")

    def anonymous_mib():
        return processes.memory(os.getpid()).anonymous / 2**20

    (tmp_path / "codes").write_bytes(np.arange(1 << 25, dtype=np.uint32).astype(np.int8).tobytes())
    codes = torch.from_numpy(np.memmap(tmp_path / "codes", np.int8, "c"))
    with on_disk(tmp_path):
        before = anonymous_mib()
        packed = _intx.pack_intx(codes, 4)
        assert anonymous_mib() - before < 8
    assert packed.numel() == 1 << 24


def test_words_of_kernels_are_the_same_on_the_disk(tmp_path):
    codes = np.random.default_rng(1).integers(0, 16, (600, 64)).astype(np.uint8)
    made = packed_in(Scratch(tmp_path), codes, 4)
    assert (made.dtype, made.shape) == (np.int32, (600, 8))
    np.testing.assert_array_equal(made, pack(codes, 4))


def test_a_cast_keeps_every_value_and_the_right_type_as_it_is(tmp_path):
    values = np.random.default_rng(2).standard_normal((1000, 33)).astype(np.float16)
    room = Scratch(tmp_path)
    np.testing.assert_array_equal(room.cast(values, np.dtype(np.float32)), values.astype(np.float32))
    assert room.cast(values, np.dtype(np.float16)) is values


def test_blocks_that_do_not_fill_an_array_are_refused(tmp_path):
    with pytest.raises(ValueError, match="do not fill an array of float32"):
        Scratch(tmp_path).array([np.zeros(3, np.float32)], (4,), np.dtype(np.float32))
