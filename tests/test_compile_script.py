"""`compile.sh` of a release, run with a stand-in for Apple's tools."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from workflow_scripts.closure import ROOT
from workflow_scripts.coreai import aot, compiled
from workflow_scripts.coreai.architectures import Target
from workflow_scripts.release.compile_script import CompileJob, compile_script
from workflow_scripts.release.names import COMPILE_SCRIPT

GPU = Target("iOS", "h18p", "gpu", "27.0", False)
MAC = Target("macOS", "h16c", "gpu", "27.0", True)
ENGINE = Target("iOS", "h18p", "neural-engine", "27.0", False)
JOBS = [
    CompileJob("gpu-pipelined/x_tbl/x_tbl.aimodel", GPU),
    CompileJob("gpu-pipelined/x_tbl/x_tbl.aimodel", MAC),
    CompileJob("ios-ane/chunk1.aimodel", ENGINE),
]
SHELLS = [path for name in ("sh", "dash", "bash") if (path := shutil.which(name))]


@pytest.fixture
def release(tmp_path):
    """A release in a folder with a space, with a language bundle and a bundle in a plain folder."""
    folder = tmp_path / "a release"
    for job in JOBS:
        bundle = folder / job.bundle
        bundle.mkdir(parents=True, exist_ok=True)
        for name in ("main.mlirb", "main.hash", "metadata.json"):
            (bundle / name).write_text(f"{name} of {bundle.name}")
    language = folder / "gpu-pipelined/x_tbl"
    (language / "tokenizer").mkdir()
    (language / "tokenizer/tokenizer.json").write_text("{}")
    (language / "metadata.json").write_text('{"assets": {"main": "x_tbl.aimodel"}, "name": "x_tbl"}\n')
    (language / "gemma4_plan.json").write_text('{"bundles": {"decoder": "x_tbl.aimodel"}}\n')
    (folder / COMPILE_SCRIPT).write_text(compile_script(JOBS))
    return folder


@pytest.fixture
def run(tmp_path, release):
    """Run the script beside the tools that it may use, with a log of how the compiler was called."""
    tools = tmp_path / "tools"
    tools.mkdir()
    log = tmp_path / "calls"
    fake = ROOT / "tests/fakes/xcrun"
    (tools / "xcrun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> "{log}"\nexec sh "{fake}" "$@"\n')
    (tools / "xcrun").chmod(0o755)

    def prepared(*arguments, shell="sh", says="ok", folder=release, **environment):
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "FAKE_XCRUN": says, **environment}
        return [shell, str(folder / COMPILE_SCRIPT), *map(str, arguments)], environment

    def script(*arguments, **more):
        command, environment = prepared(*arguments, **more)
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    script.prepared = prepared
    script.calls = lambda: [line for line in log.read_text().splitlines() if " compile " in line]
    return script


def made(output):
    return sorted(path.relative_to(output).as_posix() for path in output.rglob("*.aimodelc"))


@pytest.mark.parametrize("shell", SHELLS)
def test_everything_is_compiled_into_folders_with_the_published_names(release, run, tmp_path, shell):
    before = sorted(release.rglob("*"))
    output = tmp_path / "out put"
    done = run(output, shell=shell)
    assert done.returncode == 0, done.stderr
    assert made(output) == [
        "gpu-pipelined/x_tbl_aotc_h16c/x_tbl.h16c.aimodelc",
        "gpu-pipelined/x_tbl_aotc_h18p/x_tbl.h18p.aimodelc",
        "ios-ane/chunk1_aotc_h18p/chunk1.h18p.aimodelc",
    ]
    language = output / "gpu-pipelined/x_tbl_aotc_h18p"
    assert (
        language / "metadata.json"
    ).read_text() == '{"assets": {"main": "x_tbl.h18p.aimodelc"}, "name": "x_tbl"}\n'
    plan = (language / "gemma4_plan.json").read_text()
    assert plan == '{"bundles": {"decoder": "x_tbl.h18p.aimodelc"}}\n'
    assert (language / "tokenizer/tokenizer.json").read_text() == "{}"
    assert [path.name for path in (output / "ios-ane/chunk1_aotc_h18p").iterdir()] == ["chunk1.h18p.aimodelc"]
    assert not list(output.glob(".*")) and sorted(release.rglob("*")) == before
    assert "3 compiled" in done.stdout and "0 failed" in done.stdout


def test_the_compiler_is_called_as_the_stage_calls_it(run, tmp_path):
    run(tmp_path / "out")
    called = [re.sub(r"--output \S+", "--output OUT", call) for call in run.calls()]
    expected = [" ".join(aot.command(Path(job.bundle).name, "OUT", job.target)[1:]) for job in JOBS]
    assert sorted(called) == sorted(expected)


def test_its_limits_are_those_of_the_stage():
    limits = dict(re.findall(r"^(\w+_BYTES)=(\d+)", compile_script(JOBS), flags=re.MULTILINE))
    assert limits == {
        "LOADS_BYTES": str(compiled.LOADS_BYTES),
        "REFUSED_BYTES": str(compiled.REFUSED_BYTES),
    }


def test_one_architecture_alone_and_nothing_twice(run, tmp_path):
    output = tmp_path / "out"
    assert run(output, "h16c").returncode == 0
    assert made(output) == ["gpu-pipelined/x_tbl_aotc_h16c/x_tbl.h16c.aimodelc"]
    assert run(output).returncode == 0
    assert len(run.calls()) == len(JOBS)  # what was there was not compiled again
    unknown = run(output, "h99x")
    assert unknown.returncode == 1 and "there are: h18p h16c" in unknown.stderr.replace(
        "h16c h18p", "h18p h16c"
    )


@pytest.mark.parametrize(
    "says, said, compiled_count",
    [
        ("reject", "ended with code 64", 0),
        ("crash", "ended with code 139", 0),
        ("full", "ended with code 134", 0),
        ("renamed", "wrote no chunk1.h18p.aimodelc", 0),
        ("nothing", "wrote no chunk1.h18p.aimodelc", 0),
        ("hollow", "nothing in it is for the neural-engine", 0),
        ("fallback", "no programs for the Neural Engine", 2),
    ],
)
def test_each_failure_is_told_and_leaves_no_file(run, tmp_path, says, said, compiled_count):
    output = tmp_path / "out"
    done = run(output, says=says)
    assert done.returncode == 1
    assert re.search(rf"error: ios-ane/chunk1.aimodel for iOS h18p: .*{said}", done.stderr), done.stderr
    assert len(made(output)) == compiled_count
    assert not [
        path
        for path in output.rglob("*")
        if path.is_file() and ".aimodelc" not in str(path.parent) and "_aotc_" not in str(path)
    ]
    assert not list(output.glob(".*"))


def test_a_run_after_a_kill_compiles_the_rest_and_clears_up(run, tmp_path):
    output = tmp_path / "out"
    assert run(output, "h16c").returncode == 0
    command, environment = run.prepared(output, says="slow", FAKE_XCRUN_SECONDS="60")
    killed = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True
    )
    until = time.monotonic() + 20
    while not list(output.glob(".compile-*/written/*")) and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert list(output.glob(".compile-*/written/*.aimodelc")), "it was killed in the middle of its work"
    assert made(output / "gpu-pipelined") == ["x_tbl_aotc_h16c/x_tbl.h16c.aimodelc"]
    again = run(output)
    assert again.returncode == 0 and "x_tbl_aotc_h16c is there already" in again.stdout
    assert len(made(output)) == len(JOBS)
    assert not list(output.glob(".compile-*"))


def test_what_devices_refuse_is_not_kept_and_what_is_near_it_is_told(run, tmp_path):
    refused = run(tmp_path / "large", "h16c", FAKE_XCRUN_RESOURCES="3300000")
    assert refused.returncode == 1 and "devices refuse" in refused.stderr
    assert made(tmp_path / "large") == []
    near = run(tmp_path / "near", "h16c", FAKE_XCRUN_RESOURCES="2600000")
    assert near.returncode == 0 and "warning: a resources.bin of" in near.stderr
    assert len(made(tmp_path / "near")) == 1


def test_a_bundle_that_was_not_downloaded_does_not_stop_the_others(release, run, tmp_path):
    shutil.rmtree(release / "ios-ane")
    done = run(tmp_path / "out")
    assert done.returncode == 1 and "ios-ane/chunk1.aimodel for iOS h18p: it is not here" in done.stderr
    assert len(made(tmp_path / "out")) == 2


def test_the_release_stays_as_it_was_checked(release, run):
    for inside in (release / "compiled", release):
        done = run(inside)
        assert done.returncode == 1 and "outside of the release" in done.stderr
        assert not (release / "compiled").exists()
    assert run().returncode == 1 and "usage" in run().stderr


def test_a_host_without_the_compiler_is_told_what_to_install(release, run, tmp_path):
    missing = run(tmp_path / "out", says="missing")
    assert missing.returncode == 1 and "xcode-select" in missing.stderr
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "sh").symlink_to(shutil.which("sh"))
    done = run(tmp_path / "out", PATH=str(bare), shell=str(bare / "sh"))
    assert done.returncode == 1 and "install Xcode" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "jobs",
    [
        [],
        [JOBS[0], CompileJob(JOBS[0].bundle, ENGINE)],
        [CompileJob("/a/x.aimodel", GPU)],
        [CompileJob("a/../x.aimodel", GPU)],
        [CompileJob("a/x.aimodelc", GPU)],
        [CompileJob("x.aimodel", GPU)],
    ],
)
def test_lists_that_make_no_script_are_refused(jobs):
    with pytest.raises(ValueError, match=r"nothing to compile|compiled twice|no path of a bundle"):
        compile_script(jobs)


def test_equal_lists_give_equal_scripts_and_say_which_devices_they_are_for():
    assert compile_script(JOBS) == compile_script(JOBS[::-1])
    assert "iPhone 17 Pro" in compile_script(JOBS)
    assert "'a b/x.aimodel'" in compile_script([CompileJob("a b/x.aimodel", GPU)])


def test_the_script_has_no_faults_that_shellcheck_knows(release):
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck on this host")
    subprocess.run([shellcheck, "-s", "sh", str(release / COMPILE_SCRIPT)], check=True)
