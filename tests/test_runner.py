"""The stage runner from its command line: results, errors without tracebacks, logs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import TINY
from workflow_scripts import manifest

PARAMS = {"source": str(TINY), "allow_moving_revision": False, "sha256": {}, "num_hidden_layers": 10}


def stage(folder, name, artifact, params, *inputs, **environment):
    output = folder / name / f"{artifact}{manifest.SUFFIX}"
    command = [sys.executable, "-m", "workflow_scripts", "stage", name, "--input", *inputs]
    command += [
        "--params",
        json.dumps(params),
        "--output",
        str(output),
        "--log",
        str(folder / f"{artifact}.log"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return output, run


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage") / "with space and ünïcode"
    output, run = stage(folder, "checkpoint", "text", PARAMS, f"source={TINY}")
    assert run.returncode == 0, run.stderr
    return output


def test_a_stage_writes_result_manifest_and_log(built):
    written = manifest.verify_tree(built)
    assert written.ingredients.stage == "checkpoint"
    log = (built.parents[1] / "text.log").read_text()
    assert "reads source" in log and "wrote checkpoint.json" in log and written.digest in log


def test_the_manifest_names_no_place_of_this_machine(built):
    text = built.read_text()
    assert str(built.parents[1]) not in text and str(Path.home()) not in text.replace(str(TINY), "")


def test_the_same_inputs_give_the_same_result_elsewhere(built, tmp_path):
    output, run = stage(
        tmp_path,
        "checkpoint",
        "text",
        PARAMS,
        f"source={TINY}",
        LANG="C",
        TZ="Asia/Tokyo",
        PYTHONHASHSEED="7",
    )
    assert run.returncode == 0, run.stderr
    assert output.read_bytes() == built.read_bytes()


def test_a_users_mistake_is_one_line_and_no_result(tmp_path):
    output, run = stage(tmp_path, "checkpoint", "text", PARAMS | {"num_hidden_layers": 35}, f"source={TINY}")
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "num_hidden_layers" in run.stderr and run.stderr.count("\n") == 1
    assert not output.exists() and not manifest.tree_path(output).exists()
    assert [p.name for p in output.parent.iterdir()] == [".text.lock"]


def test_an_altered_input_is_refused_before_any_work(built, tmp_path):
    shutil.copytree(built.parent, tmp_path / "in")
    altered = tmp_path / "in/text/source/config.json"
    altered.unlink()  # it may be a hard link of the committed file
    altered.write_text("{}")
    output, run = stage(tmp_path, "tables", "t", {}, f"checkpoint={tmp_path / 'in' / built.name}")
    assert run.returncode == 1 and "source/config.json" in run.stderr and "bytes changed" in run.stderr
    assert not output.exists()


def test_an_internal_error_names_its_log(built, tmp_path):
    _, run = stage(tmp_path, "weights", "w", {}, f"checkpoint={built}")  # no recipe: the rule is wrong
    assert run.returncode == 1
    assert "internal error: KeyError('recipe')" in run.stderr and "w.log" in run.stderr
    assert "Traceback" not in run.stderr and "Traceback" in (tmp_path / "w.log").read_text()


def test_a_full_disk_is_said_plainly(built, tmp_path):
    """A result on a file system of one page: the write fails with ENOSPC and nothing is left."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        output = mount / "tables" / f"t{manifest.SUFFIX}"
        arguments = [
            "--input",
            f"checkpoint={built}",
            "--output",
            str(output),
            "--log",
            str(tmp_path / "t.log"),
        ]
        run = subprocess.run(
            [sys.executable, "-m", "workflow_scripts", "stage", "tables", *arguments],
            capture_output=True,
            text=True,
        )
        assert run.returncode == 1 and "No space left on device" in run.stderr
        assert "Traceback" not in run.stderr
        assert [p.name for p in output.parent.iterdir()] == [".t.lock"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_two_processes_do_not_make_one_result_at_the_same_time(built, tmp_path):
    """An orphan of a killed run is waited for; the lock ends with its holder, so none is ever stale."""
    import fcntl

    lock = tmp_path / "tables/.t.lock"
    lock.parent.mkdir()
    arguments = ["--input", f"checkpoint={built}", "--output", str(lock.with_name(f"t{manifest.SUFFIX}"))]
    command = [sys.executable, "-m", "workflow_scripts", "stage", "tables", *arguments]
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waiting = subprocess.Popen(
            [*command, "--log", str(tmp_path / "t.log")], stderr=subprocess.PIPE, text=True
        )
        assert "another process is making this result" in waiting.stderr.readline()
        assert not (tmp_path / "tables/t").exists()
    assert waiting.wait() == 0
    manifest.verify_tree(tmp_path / f"tables/t{manifest.SUFFIX}")


def test_an_edit_while_a_stage_runs_leaves_no_result(built, tmp_path, monkeypatch):
    """The store would serve the new code's bytes for the old code's key."""
    from workflow_scripts import closure
    from workflow_scripts.errors import UserError
    from workflow_scripts.stages import runner, tables

    stock = closure.stage_code
    edited = []
    monkeypatch.setattr(closure, "stage_code", lambda stage: stock(stage) | dict.fromkeys(edited, "0" * 64))
    run = tables.run
    monkeypatch.setattr(
        tables, "run", lambda job: (run(job), edited.append("workflow_scripts/tables/raw.py"))
    )
    output = tmp_path / f"t{manifest.SUFFIX}"
    with pytest.raises(
        UserError, match=r"workflow_scripts/tables/raw\.py changed while the stage ran: run again"
    ):
        runner.execute("tables", {"checkpoint": built}, {}, output)
    assert not output.exists()
