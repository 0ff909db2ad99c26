"""Long work shows that it goes on: a total where there is one, an estimate only where something was counted."""

import logging
import time

import pytest

from workflow_scripts import files, manifest, progress


@pytest.fixture
def shown(caplog):
    """What the terminal shows."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if record.name == "terminal"]


@pytest.fixture
def said(monkeypatch, shown):
    """What the terminal shows, as if a tenth of a second were long."""
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.05)
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.1)
    return shown


def test_a_long_step_says_how_long_it_is_at_it_and_what_is_left(said):
    for item in progress.track(range(3), "position", 3):
        time.sleep(0.16 if item else 0)
    lines = said()
    assert any(line.startswith("position 2/3, 0 s at this one, about") for line in lines)
    assert any(line.startswith("position 3/3, about 0 s left") for line in lines)


def test_the_first_step_has_no_estimate(said):
    for _ in progress.track(range(1), "position", 1):
        time.sleep(0.16)
    assert said()[0] == "position 1/1, 0 s at this one"


def test_quick_work_says_nothing(shown):
    """By the real seconds: a busy machine can take a tenth of one over a thousand log lines."""
    assert list(progress.track(range(1000), "quick", 1000)) == list(range(1000))
    with progress.working("quick"):
        pass
    assert shown() == []


def test_work_that_was_left_is_silent(said):
    for _ in progress.track(range(3), "left", 3):
        break
    time.sleep(0.2)
    assert said() == []


def test_phases_have_numbers_and_what_the_last_of_a_kind_took(said, monkeypatch):
    monkeypatch.setattr(progress, "_LEAST_TOLD", 0.0)
    phases = progress.Phases(2)
    for name in ("main", "step"):
        with phases.next("trace", name):
            time.sleep(0.16)
    lines = said()
    assert lines[0] == "phase 1/2 trace main: 0 s so far"
    assert lines[-1] == "phase 2/2 trace step (the last took 0 s): 0 s"


def test_a_phase_that_fails_is_not_said_to_be_done(said):
    with pytest.raises(ValueError), progress.working("bad"):
        time.sleep(0.12)
        raise ValueError
    assert all("so far" in line for line in said())


def test_a_folder_that_fills_shows_its_bytes(said, tmp_path):
    (tmp_path / "data").write_bytes(bytes(200_000_000))
    with progress.working("write", tmp_path, 400_000_000):
        time.sleep(0.16)
    assert "write: 0 s so far, 0.2 of 0.4 GB written" in said()


def test_bytes_hashed_and_copied_show_total_and_estimate(said, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    for name in ("a", "b"):
        (tmp_path / "tree").mkdir(exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(bytes(1_000_000))
    assert len(manifest.list_files(tmp_path / "tree")) == 2
    assert said()[-1] == "hash tree 0.0 of 0.0 GB, about 0 s left"
    assert files.sha256_file(tmp_path / "tree/a") == manifest.sha256_file(tmp_path / "tree/b")
    assert said()[-1].startswith("hash b ")
    files.copy_file(tmp_path / "tree/a", tmp_path / "copy")
    assert said()[-1].startswith("copy copy ")
    assert (tmp_path / "copy").read_bytes() == bytes(1_000_000)
    meter = progress.Meter("hash", 4_000_000_000)
    time.sleep(0.05)
    meter.add(1_000_000_000)
    assert said()[-1] == "hash 1.0 of 4.0 GB, about 0 s left"
