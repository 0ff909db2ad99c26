"""The palettizer: the exact optimum or near it as told, every weight at its nearest entry, whatever the storage."""

import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workflow_scripts.errors import UserError
from workflow_scripts.quantize.kmeans import assign, fit, round_to_float16
from workflow_scripts.quantize.palette import palettize

BF16 = np.dtype(ml_dtypes.bfloat16)
DRAWS = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "laplace": lambda random, shape: random.laplace(size=shape),
    "heavy_tailed": lambda random, shape: random.standard_t(3, size=shape),
}


def draw(shape, std=0.02, seed=0, kind="normal", dtype=BF16):
    values = DRAWS[kind](np.random.default_rng(seed), shape)
    return (values * std).astype(np.float32).astype(dtype)


def half_steps_of_float16(code):
    """A float16 number, and every other time the middle between it and the next: where ties are."""
    lower, upper = (np.uint16(n // 2).view(np.float16).astype(np.float64) for n in (2 * code, 2 * code + 2))
    return float(lower if code % 2 or code >= 0x7BFF else (lower + upper) / 2)


def dequantize(block, group_size=32):
    return np.take_along_axis(
        np.repeat(block.codebook.astype(np.float64), group_size, axis=0),
        block.indices.astype(np.intp),
        axis=1,
    )


def squared_error(weights, block, group_size=32):
    return np.sum((weights.astype(np.float64) - dequantize(block, group_size)) ** 2)


def optimal_error(values, counts, levels):
    """The least squared error of any `levels` real entries: exact dynamic program over cells of neighbouring values."""
    values = values - values[len(values) // 2]
    count, moment, square = (
        np.concatenate([[0.0], np.cumsum(counts * values**power)]) for power in (0, 1, 2)
    )
    pairs = count[None, :] - count[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        cost = square[None, :] - square[:, None] - (moment[None, :] - moment[:, None]) ** 2 / pairs
    cost[pairs <= 0] = np.inf  # cost[i, j]: one entry for the values i .. j - 1
    best = cost[0]
    for _ in range(levels - 1):
        best = np.min(best[:, None] + cost, axis=0)
    return best[-1]


def counted(weights):
    values, counts = np.unique(weights.astype(np.float64), return_counts=True)
    return values, counts.astype(np.float64)


def error_of(values, counts, centroids):
    """With each value at its nearest centroid."""
    return np.sum(counts * np.min((values[:, None] - centroids[None, :]) ** 2, axis=1))


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(("levels", "columns"), [(256, 40), (64, 64), (16, 384), (4, 384)])
def test_fit_is_the_exact_optimum(kind, levels, columns):
    values, counts = counted(draw((32, columns), kind=kind))
    least = optimal_error(values, counts, levels)
    assert error_of(values, counts, fit(values, counts, levels, 0.0)) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("tolerance", [0.005, 0.08])
def test_a_tolerance_is_kept(kind, tolerance):
    for seed in range(4):
        values, counts = counted(draw((32, 64), kind=kind, seed=seed))
        least = error_of(values, counts, fit(values, counts, 256, 0.0))
        assert error_of(values, counts, fit(values, counts, 256, tolerance)) <= (1 + tolerance) * least


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize(("bits", "columns", "most"), [(8, 40, 3e-3), (4, 384, 2e-5)])
def test_rounding_the_codebook_adds_next_to_nothing(kind, bits, columns, most):
    weights = draw((32, columns), kind=kind)
    least = optimal_error(*counted(weights), 1 << bits)
    assert squared_error(weights, palettize(weights, bits, 32, "w")) == pytest.approx(least, rel=most)


def every_partition(values, counts, levels):
    """The least squared error by trying all."""
    errors = []
    for borders in itertools.combinations(range(1, len(values)), levels - 1):
        cells = zip((0, *borders), (*borders, len(values)), strict=True)
        means = [np.average(values[i:j], weights=counts[i:j]) for i, j in cells]
        errors.append(error_of(values, counts, np.array(means)))
    return min(errors)


# Small whole numbers make many ties; the others are of very different size.
NUMBERS = st.one_of(
    st.integers(-9, 9).map(float), st.floats(-1e4, 1e4, width=16), st.integers(-30, 15).map(lambda e: 2.0**e)
)


@settings(max_examples=300)
@given(
    counted=st.dictionaries(NUMBERS, st.integers(1, 5), min_size=2, max_size=9),
    levels=st.integers(1, 8),
)
def test_fit_is_the_best_of_all_partitions(counted, levels):
    values = np.array(sorted(counted))
    counts = np.array([counted[value] for value in values], np.float64)
    found = fit(values, counts, levels, 0.0)
    assert (np.diff(found) >= 0).all() and len(found) == levels
    if len(values) <= levels:
        np.testing.assert_array_equal(found, np.pad(values, (0, levels - len(values)), mode="edge"))
        return
    least = every_partition(values, counts, levels)
    # Below float64's rounding of the sums of squares, errors cannot be told apart.
    rounding = 1e-15 * np.sum(counts * (values - values[len(values) // 2]) ** 2)
    assert error_of(values, counts, found) == pytest.approx(least, rel=1e-9, abs=rounding)


@pytest.mark.parametrize("levels", [2, 3, 7, 16, 100, 255, 256, 299])
def test_ties_everywhere_give_the_number_of_levels_and_the_optimum(levels):
    """Of equally spaced values with equal counts many numbers of cells are best at one price."""
    values, counts = np.arange(300.0), np.ones(300)
    centroids = fit(values, counts, levels, 0.0)
    assert len(np.unique(centroids)) == levels
    small, larger = 300 // levels, 300 % levels  # cells of one size, and of one more
    errors = [n * (n * n - 1) / 12 for n in (small, small + 1)]
    least = (levels - larger) * errors[0] + larger * errors[1]
    assert error_of(values, counts, centroids) == pytest.approx(least, rel=1e-9)


@given(
    st.one_of(
        st.floats(-70000, 70000), st.floats(-1e-4, 1e-4), st.integers(0, 0x7C00).map(half_steps_of_float16)
    )
)
def test_rounding_is_numpys(number):
    with np.errstate(over="ignore"):
        expected = np.float64(number).astype(np.float16).astype(np.float64) + 0.0
    found = round_to_float16(number)
    assert found == expected and np.signbit(found) == np.signbit(expected)


def test_isolated_weights_take_no_more_levels_than_they_need():
    """Nearly all of the value range is gaps between seven outliers; 249 levels must be left for the other weights."""
    weights = draw((32, 96))
    expected = squared_error(weights, palettize(weights, 8, 32, "w"))
    weights.reshape(-1)[:7] = [-50, -30, -20, 10, 20, 30, 50]
    assert squared_error(weights, palettize(weights, 8, 32, "w")) < 1.15 * expected


def test_errors_at_real_width_are_those_of_the_exact_program():
    """The optima at 8 bits, as parts of the squared weights, are from a dynamic program on these draws."""
    for seed, optimum in enumerate((3.6007e-5, 3.5492e-5, 3.5577e-5)):
        values, counts = counted(draw((32, 1536), seed=seed))
        signal = np.sum(counts * values**2)
        assert error_of(values, counts, fit(values, counts, 256, 0.0)) / signal == pytest.approx(
            optimum, rel=2e-5
        )
        assert error_of(values, counts, fit(values, counts, 256, 0.005)) / signal <= 1.005 * optimum * 1.00002


@pytest.mark.skipif(
    " " in sys.prefix,
    reason="coreai-opt compiles its k-means on first use and cannot link below a path with a space",
)
def test_error_is_lower_than_coreai_opts_default_kmeans():
    pytest.importorskip("coreai_opt")
    import torch
    from coreai_opt.palettization import KMeansPalettizer, KMeansPalettizerConfig

    weights = draw((64, 512))
    original = weights.astype(np.float32)
    model = torch.nn.Sequential(torch.nn.Linear(512, 64, bias=False))
    model[0].weight.data = torch.from_numpy(original.copy())
    spec = {
        "n_bits": 8,
        "granularity": {"type": "per_grouped_channel", "axis": 0, "group_size": 32},
        "enable_per_channel_scale": False,
    }
    config = KMeansPalettizerConfig.from_dict(
        {"kmeans_palettization_config": {"global_config": {"op_state_spec": {"weight": spec}}}}
    )
    prepared = KMeansPalettizer(model, config).prepare(example_inputs=(torch.zeros(1, 512),), num_workers=1)
    theirs = prepared[0].weight.detach().numpy().astype(np.float64)
    their_error = np.sum((original - theirs) ** 2)
    assert their_error > 0  # else this compares with weights that were not palettized
    assert squared_error(weights, palettize(weights, 8, 32, "w")) < their_error


def test_fit_is_a_fixed_point_of_lloyds_iteration():
    weights = draw((32, 1536))
    values, counts = counted(weights)
    centroids = fit(values, counts, 256, 0.0)
    nearest = np.argmin(np.abs(values[:, None] - centroids[None, :]), axis=1)
    sums = np.bincount(nearest, weights=counts * values, minlength=256)
    means = sums / np.bincount(nearest, weights=counts, minlength=256)
    np.testing.assert_allclose(means, centroids, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_gaps_of_very_different_size_leave_no_level_empty(levels):
    """The small gaps vanish in float64 beside the large ones."""
    values = np.array([0, 1e-30, 2e-30, 1])
    centroids = fit(values, np.ones(4), levels, 0.0)
    expected = {1: [[0.25]], 2: [[1e-30, 1]], 3: [[0, 1.5e-30, 1], [0.5e-30, 2e-30, 1]]}[levels]
    assert any(np.allclose(centroids, each, rtol=1e-6, atol=0) for each in expected)


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
def test_the_stored_dtype_does_not_matter(dtype):
    """The same numbers in another dtype, counted another way, give the same palette."""
    weights = draw((64, 200), std=1)
    weights[np.abs(weights) < 2**-6] = 0  # what is left is exact in float16 as well
    expected, found = palettize(weights, 8, 32, "w"), palettize(weights.astype(dtype), 8, 32, "w")
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.codebook, expected.codebook)


def test_groups_are_independent():
    weights = np.concatenate([draw((32, 100), seed=1), draw((32, 100), std=3.0, seed=2)])
    both = palettize(weights, 8, 32, "w")
    for group in range(2):
        alone = palettize(weights[32 * group : 32 * (group + 1)], 8, 32, "w")
        np.testing.assert_array_equal(both.indices[32 * group : 32 * (group + 1)], alone.indices)
        np.testing.assert_array_equal(both.codebook[group], alone.codebook[0])


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_few_different_values_are_kept_exactly(bits):
    levels = np.linspace(-3, 3, 1 << bits).astype(np.float16).astype(np.float32)
    for kept in (levels, levels[:1], levels[: len(levels) // 2 + 1]):
        weights = np.random.default_rng(0).choice(kept, (32, 64))
        block = palettize(weights, bits, 32, "w")
        np.testing.assert_array_equal(dequantize(block), weights)
        assert block.quality.error == 0 and block.quality.snr_db is None
        assert block.codebook[0, -1] == weights.max()  # unused entries repeat the last one


def test_negative_zero_is_zero():
    weights = draw((32, 64))
    weights[0, :2] = [0.0, -0.0]
    block = palettize(weights, 8, 32, "w")
    assert block.indices[0, 0] == block.indices[0, 1]
    tiny = np.where(np.arange(64) % 2, -1e-30, 1e-30).astype(BF16)[None].repeat(32, 0)
    assert not np.signbit(palettize(tiny, 8, 32, "w").codebook).any()


def test_a_tie_takes_the_lower_index():
    codebook = np.array([-1.0, 0, 0, 1, 3, 3])
    np.testing.assert_array_equal(
        assign(np.array([-2, -0.5, 0, 0.5, 2, 3, 9]), codebook), [0, 0, 1, 1, 3, 4, 4]
    )


@pytest.mark.parametrize(
    ("std", "lowest_db"), [(1, 44.5), (1e-3, 44.5), (1e-4, 44.5), (1e-5, 44), (1e-6, 34)]
)
def test_small_weights_lose_no_more_than_float16_must(std, lowest_db):
    """Rounding weights to 4 decimals, as a common tool does, leaves 11 dB at 1e-4; float16 is the limit at 1e-6."""
    weights = draw((32, 512), std=std)
    signal = np.sum(weights.astype(np.float64) ** 2)
    block = palettize(weights, 8, 32, "w")
    assert 10 * np.log10(signal / squared_error(weights, block)) > lowest_db
    assert block.quality.snr_db == round(10 * np.log10(signal / squared_error(weights, block)), 2)


FLOATS = st.floats(-60000, 60000, width=32)


@settings(max_examples=60)
@given(
    weights=hnp.arrays(np.float32, st.tuples(st.sampled_from([4, 8]), st.integers(1, 12)), elements=FLOATS),
    bits=st.integers(1, 5),
    dtype=st.sampled_from([BF16, np.dtype(np.float32)]),
)
def test_invariants(weights, bits, dtype):
    weights = weights.astype(dtype)
    block = palettize(weights, bits, 4, "w")
    entries, original = block.codebook.astype(np.float64), weights.astype(np.float64)
    assert block.indices.max() < 1 << bits
    assert (np.diff(entries, axis=1) >= 0).all()
    error = np.abs(original - dequantize(block, 4))
    for group, palette in enumerate(entries):
        rows = slice(4 * group, 4 * group + 4)
        every = np.abs(original[rows][..., None] - palette)
        np.testing.assert_array_equal(error[rows], every.min(axis=-1))  # no entry is nearer
        np.testing.assert_array_equal(block.indices[rows], every.argmin(axis=-1))  # and no lower one as near
        inside = (original[rows] >= palette[0]) & (original[rows] <= palette[-1])
        assert (error[rows][inside] <= np.diff(palette).max() / 2).all()


@pytest.mark.parametrize(
    ("bad", "word"), [(np.inf, "infinite"), (-np.inf, "infinite"), (np.nan, "not a number")]
)
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
def test_a_weight_that_is_not_finite_is_refused_by_name(bad, word, dtype):
    weights = draw((64, 32), dtype=dtype)
    weights[40, 3] = bad
    with pytest.raises(UserError, match=rf"layers\.1\.x .*{word}"):
        palettize(weights, 8, 32, "layers.1.x")


def test_a_weight_beyond_float16_is_refused_by_name():
    with pytest.raises(UserError, match="huge has weights beyond 65504"):
        palettize(np.full((32, 4), 1e5, BF16), 8, 32, "huge")


@pytest.mark.parametrize("shape", [(48, 8), (0, 8), (32, 0), (64,)])
def test_a_shape_without_whole_groups_is_refused_by_name(shape):
    with pytest.raises(UserError, match=r"odd has shape .* multiple of 32"):
        palettize(np.zeros(shape, BF16), 8, 32, "odd")
