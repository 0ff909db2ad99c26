"""The benches of tables, saving and gates: both sides are given the same, and what is missed is named and fails."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from workflow_scripts.checks import bench, bench_gate, bench_save, bench_tables
from workflow_scripts.checks.bench_gate import Step
from workflow_scripts.checks.bench_palettes import map_palettes
from workflow_scripts.checks.bench_save import Saved
from workflow_scripts.checks.measure import all_reached, copy_bytes, least_seconds, memory_columns
from workflow_scripts.checks.memory import peak_anonymous
from workflow_scripts.errors import UserError
from workflow_scripts.usage import processes

SHAPE = (2048, 512)  # a megabyte of codes
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc")


def test_a_copy_reads_all_and_writes_as_many_bytes_as_it_is_told(tmp_path):
    (tmp_path / "source").write_bytes(os.urandom(100_000))
    copy_bytes(tmp_path / "source", tmp_path / "whole", 100_000, 4096)
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "source").read_bytes()
    copy_bytes(tmp_path / "source", tmp_path / "half", 50_000, 4096)
    assert (tmp_path / "half").stat().st_size == pytest.approx(50_000, abs=25)


def test_runs_take_turns_and_the_least_time_counts(monkeypatch):
    order, clock = [], iter([0, 5, 10, 11, 20, 22, 30, 34])  # 5, 1, 2 and 4 seconds
    monkeypatch.setattr("time.process_time", lambda: next(clock))
    assert least_seconds(lambda: order.append("a"), lambda: order.append("b"), rounds=2) == [2, 1]
    assert order == ["a", "b", "a", "b"]


@on_linux
def test_the_peak_of_anonymous_memory_is_seen_and_mapped_pages_are_not(tmp_path):
    size = 64 << 20  # more than the allocator ever keeps for itself
    np.zeros(size, np.uint8).tofile(tmp_path / "file")
    with peak_anonymous() as mapped:
        pages = np.memmap(tmp_path / "file", np.uint8, "r")
        assert pages.max() == 0
    with peak_anonymous() as held:
        values = np.ones(size, np.uint8)
    assert len(values) == len(pages)  # both were there until their blocks ended
    assert mapped.bytes < size / 4 < size <= held.bytes < 1.5 * size


@on_linux
def test_the_peak_is_seen_while_the_interpreter_is_locked():
    """A child that takes memory in one call that holds the lock, as conversion and saving may."""
    code = (
        "from workflow_scripts.checks.memory import peak_anonymous\n"
        "with peak_anonymous() as peak:\n"
        "    len(sorted(bytes(30_000_000)))\n"  # a list of pointers, sorted
        "print(peak.bytes)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) >= 8 * 30_000_000


def test_memory_that_a_system_does_not_tell_is_not_made_up(monkeypatch):
    monkeypatch.setattr(processes, "memory", lambda pid: None)
    with peak_anonymous() as peak:
        pass
    assert peak.bytes is None
    assert "not known" in memory_columns(None, 1)
    assert memory_columns(3 << 20, 6 << 20).split() == ["3", "0.50"]


def test_tables_are_compared_with_copies_of_what_they_read_and_write(tmp_path):
    seconds = bench_tables.compare_with_copies(tmp_path, SHAPE, 1)
    assert len(seconds) == 3 and min(seconds) > 0
    source, rows, copy = (
        (tmp_path / name).stat().st_size for name in ("source.safetensors", "rows.i8", "copy")
    )
    assert rows == SHAPE[0] * SHAPE[1] == copy  # the last copy is that of what is written
    assert 2 * rows < source < 2 * rows + 1000


def test_tables_that_are_too_slow_are_missed():
    assert bench_tables.misses(1.5, 1.0) == []
    assert bench_tables.misses(1.51, 1.0) == ["tables: at most 1.5 times a copy's time"]


@pytest.fixture
def in_this_process(monkeypatch):
    """What the benches give to fresh processes, which only the memory needs, and which take seconds to begin."""
    for bench_of in (bench_save, bench_gate):
        monkeypatch.setattr(bench_of, "isolated", lambda function, **given: function(**given))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_both_save_the_same_program(in_this_process, tmp_path):
    home, (ours, theirs) = tmp_path, bench_save.compare(tmp_path, 4, SHAPE, 1)
    assert ours.size == pytest.approx(theirs.size, rel=0.01)
    assert ours.size > 4 * SHAPE[0] * SHAPE[1]
    assert min(ours.converting, ours.saving, theirs.converting, theirs.saving) > 0
    palettes = map_palettes(home, 4, SHAPE)
    programs = [(home / f"{way}.aimodel" / "main.mlirb").read_bytes() for way in ("ours", "theirs")]
    assert all(palette.indices.tobytes() in program for palette in palettes for program in programs)


@pytest.mark.parametrize(
    ("seconds", "memory", "missed"),
    [
        (1.0, 333, []),
        (1.1, 333, ["saving: at most 1 times the time of save_asset"]),
        (1.0, 334, ["saving: at most 0.33 of the anonymous memory of save_asset"]),
        (1.0, None, []),
    ],
)
def test_saving_beyond_what_is_demanded_is_missed(seconds, memory, missed):
    theirs = Saved(1.0, 1.0, 1000, None if memory is None else 1000)
    assert bench_save.misses(Saved(1.0, seconds, 1000, memory), theirs) == missed


def test_the_runtime_and_torch_compute_the_same(in_this_process, tmp_path):
    size, runtime, in_torch = bench_gate.compare(tmp_path, 2, SHAPE, 1)
    assert size > 2 * SHAPE[0] * SHAPE[1]
    assert runtime.output.shape == in_torch.output.shape == (1, 1, SHAPE[0])
    assert runtime.seconds > 0 and in_torch.seconds > 0
    x = np.random.default_rng(1).standard_normal((1, 1, SHAPE[1]), np.float32)
    exact = sum(
        palette.dequantize() @ x[0, 0].astype(np.float64) for palette in map_palettes(tmp_path, 2, SHAPE)
    )
    np.testing.assert_allclose(runtime.output[0, 0], exact, atol=1e-4 * np.abs(exact).max())


@pytest.mark.parametrize("wrong", [1.001, np.nan])
def test_another_result_than_torchs_is_refused(wrong):
    expected = np.array([0.5, -1.0])
    bench_gate.refuse_difference(expected + 1e-5, expected)
    with pytest.raises(UserError, match=r"the runtime's numbers are .* off torch's"):
        bench_gate.refuse_difference(np.array([0.5, -wrong]), expected)


def test_a_gate_that_holds_all_matrices_is_missed():
    step = Step(1.0, 3 * 4 * SHAPE[0] * SHAPE[1], np.zeros(1))
    assert bench_gate.misses(step, SHAPE) == []
    assert bench_gate.misses(Step(1.0, None, np.zeros(1)), SHAPE) == []
    beyond = Step(1.0, step.memory + 1, np.zeros(1))
    assert bench_gate.misses(beyond, SHAPE) == [
        "gate numbers: anonymous memory of at most 3 matrices in float32 (12 MiB)"
    ]


def test_a_miss_is_printed_and_fails_the_bench(monkeypatch, capsys):
    assert all_reached([]) and not all_reached(["x: too slow"])
    assert capsys.readouterr().out == "missed: x: too slow\n"
    monkeypatch.setattr(bench, "bench_kernels", SimpleNamespace(print_table=lambda: None))
    monkeypatch.setattr(bench, "SCENARIOS", ())
    monkeypatch.setattr(bench, "copy_project", lambda project: None)
    monkeypatch.setattr(bench, "_seconds", lambda project, environment: 1.0)
    for results in ([True, True], [True, False], [False, True]):
        monkeypatch.setattr(bench, "DEMANDING", [lambda reached=reached: reached for reached in results])
        assert bench.main() == (0 if all(results) else 1)
