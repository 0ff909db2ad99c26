"""The quantizer's bench: it says what is missed, and both sides are given the same."""

import sys

import pytest

from workflow_scripts.checks import bench_quantize
from workflow_scripts.checks.bench_quantize import Palettized, compare, compare_with_copy, draw
from workflow_scripts.quantize.recipes import RECIPES

GOOD = {"seconds": 1.0, "their_seconds": 100.0, "error": 0.99, "their_error": 1.0, "least_error": 0.95}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"their_seconds": 99.0}, ["100 times the speed"]),
        ({"their_error": 0.99}, ["a lower error than coreai-opt's"]),
        ({"least_error": 0.9}, ["1.08 times the least error"]),
        ({"seconds": 2.0, "error": 1.5}, 3),
    ],
)
def test_what_is_missed_is_named(changed, missed):
    found = Palettized(**GOOD | changed).misses(100.0)
    assert found == missed or len(found) == missed


@pytest.mark.skipif(
    " " in sys.prefix,
    reason="coreai-opt compiles its k-means on first use and cannot link below a path with a space",
)
@pytest.mark.parametrize("recipe", ["int8-kmeans-g32", "int4-kmeans-g32"])
def test_a_matrix_is_palettized_on_both_sides(recipe, monkeypatch):
    pytest.importorskip("coreai_opt")
    monkeypatch.setattr(bench_quantize, "_ROUNDS", 1)
    found = compare(draw("normal", (64, 512)), RECIPES[recipe].encodings["mlp"])
    assert 0 < found.seconds < found.their_seconds
    assert found.least_error <= found.error < found.their_error < 0.02


def test_a_copy_reads_all_and_writes_as_much_as_the_codes_and_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_quantize, "_ROUNDS", 1)
    monkeypatch.setattr(bench_quantize, "_SHAPES", ((64, 512),))
    seconds, copied = compare_with_copy(RECIPES["int4-linear-b32"].encodings["mlp"], tmp_path)
    assert seconds > 0 and copied > 0
    written, copy = ((tmp_path / name).stat().st_size for name in ("result.safetensors", "copy"))
    assert written == pytest.approx(64 * 512 * (1 + 2 / 32), rel=0.02)
    assert copy == pytest.approx(written, abs=8)


def test_a_miss_fails_the_bench(monkeypatch, capsys):
    monkeypatch.setattr(bench_quantize, "_print_palettes", lambda: iter(["x: too slow"]))
    monkeypatch.setattr(bench_quantize, "_print_linear", lambda: iter([]))
    assert not bench_quantize.print_tables()
    assert "missed: x: too slow" in capsys.readouterr().out
    monkeypatch.setattr(bench_quantize, "_print_palettes", lambda: iter([]))
    assert bench_quantize.print_tables()
