"""KL divergence and agreement over a long run, and the comparison of folders with each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from scipy.special import log_softmax, rel_entr

from workflow_scripts.gates.agreement import gate_agreement
from workflow_scripts.gates.divergence import (
    CONFIDENCE,
    LARGEST_DIVERGENCE,
    LARGEST_SHARE,
    Divergence,
    divergence,
    gate_divergence,
    mean_interval,
    share_interval,
)
from workflow_scripts.gates.verdict import Verdict

LOGITS = arrays(np.float32, (3, 11), elements=st.floats(-30, 30, width=32))


def failures(verdict):
    return [check.name for check in verdict.checks if not check.passed]


@given(LOGITS, LOGITS, st.integers(1, 11))
def test_divergence_is_that_of_scipy_however_the_ids_are_cut(original, found, block):
    cuts = [slice(start, start + block) for start in range(0, 11, block)]
    result = divergence((original[:, cut], found[:, cut]) for cut in cuts)
    p, q = (np.exp(log_softmax(rows.astype(np.float64), axis=1)) for rows in (original, found))
    np.testing.assert_allclose(result.nats, rel_entr(p, q).sum(1), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(result.same, original.argmax(1) == found.argmax(1))


@pytest.mark.parametrize("count", [1, 7, 273])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_the_interval_of_a_share_is_wilsons(count, share):
    hits = round(count * share)
    expected = stats.binomtest(hits, count).proportion_ci(CONFIDENCE, "wilson")
    np.testing.assert_allclose(share_interval(hits, count), expected, atol=1e-6)


def test_the_interval_of_dependent_values_is_wider_than_that_of_independent_ones():
    """Runs of ten equal values: the error of their mean is that of a tenth as many."""
    generator = np.random.default_rng(0)
    independent = generator.exponential(size=400)
    runs = np.repeat(generator.exponential(size=40), 10)
    widths = [high - low for low, high in map(mean_interval, (independent, runs))]
    assert widths[1] > 2 * widths[0]
    low, high = mean_interval(independent)
    assert low < independent.mean() < high
    assert mean_interval(np.full(50, 0.25)) == (0.25, 0.25)


def test_the_interval_holds_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(60):
        noise = generator.standard_normal(301)
        low, high = mean_interval(1 + noise[1:] + noise[:-1])  # neighbours share a term
        held += low < 1 < high
    assert held >= 50


@pytest.mark.parametrize(
    ("nats", "unequal", "expected"),
    [
        (0.0, 0, []),
        (1.1 * LARGEST_DIVERGENCE, 0, ["KL divergence, upper end of its mean's 95% interval"]),
        (0.0, 40, ["top-1 agreement"]),
        (np.nan, 0, ["KL divergence"]),
        (np.inf, 0, ["KL divergence"]),
    ],
)
def test_each_of_the_two_bounds_accuses(nats, unequal, expected):
    verdict = Verdict("long_run", "folder")
    gate_divergence(verdict, "long", Divergence(np.full(273, nats), np.arange(273) >= unequal))
    assert failures(verdict) == [f"long: {name}" for name in expected]


@given(arrays(np.float64, 8, elements=st.floats(-3, 3)), arrays(np.float64, 8, elements=st.floats(-3, 3)))
def test_the_bound_says_how_often_a_sampler_may_draw_another_id(one, other):
    p, q = (np.exp(log_softmax(values)) for values in (one, other))
    if rel_entr(p, q).sum() <= LARGEST_DIVERGENCE:
        assert np.abs(p - q).sum() / 2 <= LARGEST_SHARE + 1e-9


ROOM = {"macos": 320, "ios-gpu": 320, "ios-ane": 64}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"ios-ane": {"a": [1, 2]}}, []),  # less room: fewer ids, and dialogues that do not fit
        ({"ios-gpu": {"a": [1, 2, 4], "long": [5, 6]}}, ["a"]),
        ({"ios-gpu": {"a": [1, 2], "long": [5, 6]}}, ["a"]),
        ({"ios-gpu": {"a": [1, 2, 3]}}, ["long"]),
        ({"ios-ane": {"a": [1, 3]}}, ["a"]),
        ({"macos": {"a": [1, 2, 3], "long": [5, 7]}, "ios-ane": {"a": [1, 2, 3]}}, ["long"]),
    ],
)
def test_folders_must_say_the_same(changed, expected):
    same = {"a": [1, 2, 3], "long": [5, 6]}
    folders = {"macos": same, "ios-gpu": same, "ios-ane": {"a": [1, 2, 3], "long": [5]}} | changed
    verdict = Verdict("agreement", "folders")
    gate_agreement(verdict, folders, ROOM)
    assert failures(verdict) == expected


def test_one_folder_or_no_dialogue_is_no_agreement():
    verdict = Verdict("agreement", "folders")
    gate_agreement(verdict, {"macos": {}}, {"macos": 320})
    assert failures(verdict) == ["folders that chat", "dialogues"]
