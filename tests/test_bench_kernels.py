"""The kernels read each packed weight exactly once, and keep their sums in registers."""

from dataclasses import replace

import pytest

from tests.kernel_inputs import HEADS, MATVECS, WIDTHS
from workflow_scripts.checks.bench_kernels import LIMIT, count, plain_matrix, shipped_calls
from workflow_scripts.kernels.binding import KernelHead, KernelMatvec
from workflow_scripts.msl.registers import moving_indices
from workflow_scripts.msl.run import Uses

COLUMNS, ROWS = 288, 64  # one whole step of 256 values, and a tail; two threadgroups
KERNELS = [(MATVECS, KernelMatvec), (HEADS, KernelHead)]
LAYERS = [
    layer(bindings[bits].KERNEL, plain_matrix(bits, COLUMNS, ROWS))
    for bindings, layer in KERNELS
    for bits in WIDTHS
]
NAMES = [layer.kernel.name for layer in LAYERS]
ONCE = (1, 1)
UNROLL = "#pragma unroll"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundle, and the programs: the runtime is compiled once for all of them."""
    return tmp_path_factory.mktemp("counted")


@pytest.fixture(scope="module")
def calls(folder):
    """Kernel -> its call as a bundle ships it."""
    return dict(zip(NAMES, shipped_calls(LAYERS, folder), strict=True))


def mutated(call, old, new, times=-1):
    assert old in call.source
    return replace(call, source=call.source.replace(old, new, times))


@pytest.mark.parametrize("name", NAMES)
def test_each_word_and_each_codebook_entry_is_read_once(name, calls, folder):
    counted = count(calls[name], folder)
    tensors, (layer,) = counted.accesses.tensors, [layer for layer in LAYERS if layer.kernel.name == name]
    assert tensors["W"] == Uses(layer.words.numel(), *ONCE)
    assert tensors["CODEBOOK"] == Uses(layer.codebook.numel(), *ONCE)
    simd_groups = ROWS // (4 if isinstance(layer, KernelMatvec) else 8)
    assert tensors["X"] == Uses(COLUMNS * simd_groups, simd_groups, simd_groups)
    assert counted.reads() == counted.least()
    assert all(
        (tensors[result.name].fewest, tensors[result.name].most) == ONCE for result in counted.call.results
    )
    assert counted.accesses.threadgroup_bytes == 4 * layer.codebook.shape[1] <= LIMIT


def test_a_word_that_is_read_twice_is_seen(calls, folder):
    twice = mutated(
        calls["palette_matvec_int4"],
        "uint(W[k / 8, row + r])",
        "uint(W[k / 8, row + r] | W[k / 8, row + (r & 2)])",
    )
    words = ROWS * COLUMNS // 8
    counted = count(twice, folder)
    # Even rows are read by themselves, and again for themselves and for the odd row behind them.
    assert counted.accesses.tensors["W"] == Uses(2 * words, 1, 3)
    assert counted.reads()["W"] == 2 * counted.least()["W"]


def test_a_word_read_for_another_is_seen_though_the_total_is_right(calls, folder):
    swapped = mutated(
        calls["palette_matvec_int4"], "uint(W[k / 8, row + r])", "uint(W[k / 8, row + (r & 2)])"
    )
    assert count(swapped, folder).accesses.tensors["W"] == Uses(ROWS * COLUMNS // 8, 0, 2)


@pytest.mark.parametrize("name", NAMES)
def test_sums_stay_in_registers(name, calls):
    call = calls[name]
    assert "sums[" in call.source and moving_indices(call.source, call.name) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("sums[r] +=", "sums[lane & 3] +=", ["sums[lane & 3]"]),
        ("sums[r] +=", "sums[uint(sums[0])] +=", ["sums[uint(sums[0])]"]),
        ("sums[r] +=", "high[lane] += sums[r] +=", ["high[lane]"]),
        ("sums[r] +=", "*(sums + lane) +=", ["sums"]),
        (
            "float sums[",
            "const float other[2] = {}, more[2] = {}; float y = more[lane]; float sums[",
            ["more[lane]"],
        ),
        (f"{UNROLL}\n    for", "for", ["sums[r]"]),
        (f"{UNROLL}\n    for", f"// {UNROLL}\n    for", ["sums[r]"]),
        ("const uint row =", "uint r = lane; sums[r] = 0.0f; const uint row =", ["sums[r]"]),
        ("sums[r] +=", "r += lane & 1; sums[r] +=", ["sums[r]"]),
        ("        sums[r] +=", "        for (uint r = 0; r < K; ++r) sums[r] +=", ["sums[r]"]),
    ],
    ids=[
        "run-time",
        "nested",
        "vector",
        "pointer",
        "declared",
        "rolled",
        "comment",
        "outside",
        "changed",
        "shadowed",
    ],
)
def test_a_moving_index_is_found(name, old, new, found, calls):
    call = mutated(calls[name], old, new, 1)
    assert moving_indices(call.source, call.name) == found
