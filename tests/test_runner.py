"""The stage runner from its command line: results, errors without tracebacks, logs."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import TINY, ordinary_user
from workflow_scripts import closure, manifest
from workflow_scripts.errors import UserError
from workflow_scripts.stages import runner
from workflow_scripts.store.levels import Store
from workflow_scripts.store.local import LocalStore

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


def run_here(name, source, output, log, params="{}"):
    """A stage's command line in this process; returns the exit code."""
    places = ["--output", str(output), "--log", str(log)]
    return runner.main([name, "--input", source, "--params", params, *places])


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


def test_a_write_that_fails_midway_leaves_nothing_and_says_where(built, tmp_path, capfd):
    """As on a full disk, which needs root to be made: a limit on the size of files."""
    output = tmp_path / "tables" / f"t{manifest.SUFFIX}"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
    try:
        code = run_here("tables", f"checkpoint={built}", output, tmp_path / "t.log")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capfd.readouterr().err
    assert code == 1 and f"tables t: error: File too large: {output.parent / 't'}: mend that and run" in said
    assert [p.name for p in output.parent.iterdir()] == [".t.lock"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this host")
def test_a_log_that_cannot_be_written_costs_no_result(built, tmp_path, capfd):
    """The log is on a full disk, the result is not."""
    output = tmp_path / f"t{manifest.SUFFIX}"
    assert run_here("tables", f"checkpoint={built}", output, Path("/dev/full")) == 0, capfd.readouterr().err
    manifest.verify_tree(output)


@pytest.mark.parametrize("fault", [ValueError("a planted fault"), MemoryError()])
@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_quantizer_that_fails_fails_the_stage(built, tmp_path, monkeypatch, capfd, fault, threads):
    """Whatever is raised, and on whatever thread: never a warning beside a result that lacks a tensor."""
    from workflow_scripts.quantize import encode

    def fail(*_):
        raise fault

    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(encode, "palettize", fail)
    output = tmp_path / "weights" / f"w{manifest.SUFFIX}"
    recipe = '{"recipe": "int8-kmeans-g32"}'
    assert run_here("weights", f"checkpoint={built}", output, tmp_path / "w.log", recipe) == 1
    assert "weights w: internal error: " in capfd.readouterr().err
    assert [p.name for p in output.parent.iterdir()] == [".w.lock"]


def test_a_folder_that_cannot_be_written_is_named(built, capfd):
    """Results on a disk that was mounted for reading, or of another user: one line, and nothing is touched."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o777)
        results = Path(shutil.copytree(built.parents[1], Path(place) / "results"))
        results.chmod(0o555)
        before = sorted(results.rglob("*"))
        source = f"checkpoint={results / 'checkpoint' / built.name}"
        with ordinary_user():
            code = run_here("tables", source, results / f"tables/t{manifest.SUFFIX}", Path(place, "t.log"))
        assert (code, sorted(results.rglob("*"))) == (1, before)
        results.chmod(0o755)
    said = f"tables t: error: Permission denied: {results / 'tables'}: mend that and run again\n"
    assert said in capfd.readouterr().err


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
    from workflow_scripts.stages import tables

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


# --- killed at any step ----------------------------------------------------------------------------------------------

FORK = multiprocessing.get_context("fork")
STEPS = ("rename", "replace", "unlink", "link")
"""What puts things in place and takes them away: between two of these nothing changes for a reader."""


def execute(folder, content, store):
    """A result of two files through the runner; the stage itself is the simplest there can be."""
    closure_of = {"code": {"stage.py": content}, "tools": {}, "host": {}}

    def fill(stage, job):
        for name in ("a", "sub/b"):
            (job.out / name).parent.mkdir(exist_ok=True)
            (job.out / name).write_text(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_run", fill)
        for name, value in closure_of.items():
            patch.setattr(closure, f"stage_{name}", lambda stage, value=value: value)
        return runner.execute("stage", {}, {}, folder / f"thing{manifest.SUFFIX}", store)


def execute_and_die(folder, content, store, step):
    """In a child: kill -9 right before the given one of `STEPS`; the exit code is 0 where there are fewer."""
    count = iter(range(1, 1000))

    def deadly(call):
        def call_or_die(*arguments, **options):
            if next(count) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return call_or_die

    for name in STEPS:
        setattr(os, name, deadly(getattr(os, name)))
    execute(folder, content, store)
    os._exit(0)


@pytest.mark.parametrize("stored", [False, True])
def test_a_run_killed_at_any_step_leaves_the_old_the_new_or_nothing(tmp_path, stored):
    """Of a result that takes the place of an earlier one; and the same command again makes it whole, and alone."""
    store = Store(LocalStore(tmp_path / "store"), None) if stored else None
    seen = []
    for step in range(1, 1000):
        home = tmp_path / f"{step}"
        execute(home, "old", None)
        child = FORK.Process(target=execute_and_die, args=(home, "new", store, step))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        output = home / f"thing{manifest.SUFFIX}"
        if output.exists():
            manifest.verify_tree(output)
        seen.append((home / "thing/a").read_text() if output.exists() else "nothing")
        assert not execute(home, "new", store).from_store or stored
        assert [entry.path for entry in manifest.verify_tree(output).files] == ["a", "sub/b"]
        assert {(home / "thing" / name).read_text() for name in ("a", "sub/b")} == {"new"}
        assert not list(home.glob(".tmp-*"))
        if stored:
            shutil.rmtree(tmp_path / "store")
    assert {"old", "nothing"} <= set(seen) and len(seen) >= 5
