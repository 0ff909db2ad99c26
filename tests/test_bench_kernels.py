"""The kernels read each packed weight exactly once, and keep their sums in registers."""

import copy

import pytest

from tests.kernel_inputs import HEADS, MATVECS, WIDTHS
from workflow_scripts.checks.bench_kernels import count, moving_indices, zeros
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec

COLUMNS = 288  # one whole step of 256 values, and a tail
KERNELS = [(MATVECS[bits], KernelMatvec) for bits in WIDTHS] + [(HEADS[bits], KernelHead) for bits in WIDTHS]


def name(value):
    return getattr(getattr(value, "KERNEL", None), "name", "")


@pytest.mark.parametrize(("binding", "layer"), KERNELS, ids=name)
def test_each_word_is_read_once_and_each_codebook_entry_once(binding, layer, tmp_path):
    matrix = zeros(binding.BITS, COLUMNS, 64)
    used = count(layer(binding.KERNEL, matrix), binding.KERNEL, COLUMNS, tmp_path).accesses
    assert used.elements["W"] == matrix.words.numel()
    assert used.elements["CODEBOOK"] == matrix.codebook.numel()
    assert used.elements["X"] == COLUMNS * 64 // (4 if layer is KernelMatvec else 8)
    assert used.threadgroup_bytes == 4 << binding.BITS


def test_a_word_that_is_read_twice_is_counted(tmp_path):
    binding = MATVECS[4]
    kernel = copy.copy(binding.KERNEL)
    kernel.src = kernel.src.replace("uint(W[k / 8, row + r])", "uint(W[k / 8, row + r] | W[k / 8, row + r])")
    kernel.kernel_cache, kernel._scalar_kernel_caches = {}, {}
    assert kernel.src != binding.KERNEL.src
    matrix = zeros(4, COLUMNS, 64)
    used = count(KernelMatvec(kernel, matrix), kernel, COLUMNS, tmp_path).accesses
    assert used.elements["W"] == 2 * matrix.words.numel()


@pytest.mark.parametrize(("binding", "layer"), KERNELS, ids=name)
def test_sums_stay_in_registers(binding, layer):
    source = binding.KERNEL.src
    assert "sums[" in source and moving_indices(source) == []
    assert moving_indices(source.replace("sums[r] +=", "sums[lane & 3] +=")) == ["sums[lane & 3]"]
    assert "sums[r]" in moving_indices(source.replace("#pragma unroll", ""))
