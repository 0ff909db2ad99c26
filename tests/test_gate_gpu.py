"""The gate of the GPU and of Metal's compiler: what this host cannot run it says, what it can run it judges.

The only pretend part is `fakes/xcrun`.
"""

import json
import os
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.gate_inputs import judge
from workflow_scripts import closure
from workflow_scripts.coreai import gpu as host_gpu
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.gates import gpu
from workflow_scripts.gates.oracle import FORMAT, Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.release import driver
from workflow_scripts.release.plan import Plan
from workflow_scripts.scratch import Scratch
from workflow_scripts.stages import gate_gpu

FAKES = Path(__file__).parent / "fakes"
PROMPT, ANSWER = [2, 5, 7], [11, 13, 1]
ON_A_MAC = (platform.system(), platform.machine()) == ("Darwin", "arm64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_weights):
    """A packaged folder as far as this gate reads it on a host without a GPU: a plan, and a head with its kernel."""
    from workflow_scripts.coreai.convert import Function, save_bundle
    from workflow_scripts.kernels import head_argmax_int8
    from workflow_scripts.model.signature import head_argmax_metal
    from workflow_scripts.quantize.weights import Weights

    weights = Weights.open(tiny_weights["int8-kmeans-g32"])
    root = tmp_path_factory.mktemp("packaged") / "macos"
    (root / "head.aimodel").mkdir(parents=True)
    (root / "tokenizer").mkdir()
    head = head_argmax_int8.head(weights, HEAD_WEIGHT, Scratch(root))
    function = Function("main", head, head_argmax_metal(weights.config, 0, "fp16")["main"])
    save_bundle([function], root / "head.aimodel", {}, [head_argmax_int8.KERNEL])
    Plan("hostcache", {"head": "head.aimodel"}, [], "tokenizer", 64, [1], {}).write(root)
    return root


def dialogue(name, output=ANSWER):
    gated = list(range(len(output)))
    return Dialogue(name, [], PROMPT, output, gated, stops=True, numbers=False, text="")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """A short and a long dialogue."""
    tree = tmp_path_factory.mktemp("oracle")
    dialogues = [dialogue("short"), dialogue("long", [11] * 300 + [1])]
    entries = {one.name: {k: v for k, v in one.__dict__.items() if k != "name"} for one in dialogues}
    (tree / "oracle.json").write_text(
        json.dumps({"format": FORMAT, "checkpoint": "abc", "dialogues": entries})
    )
    return tree


@pytest.fixture
def xcrun(monkeypatch):
    """Put the pretend xcrun first and choose what it does; `none` for a host without one."""

    def choose(behaviour):
        folders = os.environ["PATH"].split(os.pathsep)
        if behaviour == "none":
            folders = [place for place in folders if not (Path(place) / "xcrun").exists()]
        else:
            folders.insert(0, str(FAKES))
            monkeypatch.setenv("FAKE_XCRUN", behaviour)
        monkeypatch.setenv("PATH", os.pathsep.join(folders))

    return choose


def verdict_of(folder, oracle, out):
    failed = judge("gate_gpu", {"folder": folder, "oracle": oracle}, out)
    return json.loads((out / "verdict.json").read_text()), failed


@pytest.mark.skipif(ON_A_MAC, reason="this host may have a GPU for it")
def test_a_host_with_neither_says_not_run_and_why(folder, oracle, xcrun, tmp_path):
    xcrun("none")
    verdict, failed = verdict_of(folder, oracle, tmp_path / "out")
    assert verdict["verdict"] == "not_run" and failed == {}
    assert "the kernels are not compiled: this host has no xcrun (it comes with Xcode)" in verdict["reason"]
    assert "nothing ran on a GPU: this host has no Metal: kernels run under macOS 27" in verdict["reason"]
    assert platform.machine() not in verdict["reason"], (
        "the reason is part of a release, the same on every host"
    )
    table = (tmp_path / "out/measured_table.txt").read_text()
    assert table.count("not run: ") == 2


@pytest.mark.skipif(ON_A_MAC, reason="this host may have a GPU for it")
@pytest.mark.parametrize("behaviour", ["ok", "missing"])
def test_what_can_be_compiled_is_compiled_without_a_gpu(folder, oracle, xcrun, tmp_path, behaviour):
    xcrun(behaviour)
    verdict, _ = verdict_of(folder, oracle, tmp_path / "out")
    assert verdict["verdict"] == "not_run"
    compiled = {c["name"]: c["found"] for c in verdict["checks"] if "compiler" in c["name"]}
    assert compiled == (
        {"Metal compiler: head_argmax_int8_aaaaaaaa": "compiles"} if behaviour == "ok" else {}
    )
    missing = (
        'no metal compiler (xcrun: error: unable to find utility "metal", not a developer tool or in PATH)'
    )
    assert (missing in verdict["reason"]) == (behaviour == "missing")


@pytest.mark.parametrize("behaviour", ["reject", "crash"])
def test_a_source_that_the_compiler_does_not_take_fails_everywhere(
    folder, oracle, xcrun, tmp_path, behaviour
):
    xcrun(behaviour)
    verdict, failed = verdict_of(folder, oracle, tmp_path / "out")
    assert verdict["verdict"] == "fail"
    (found,) = failed.values()
    text = (closure.PACKAGE / "kernels/head_argmax_int8.metal").read_text().splitlines()
    line = next(number for number, line in enumerate(text, 1) if "threadgroup_barrier" in line)
    assert found.startswith(
        {
            "reject": f"head_argmax_int8.metal:{line}:1: error: use of undeclared identifier 'threadgroup_barrier'",
            "crash": "metal died by SIGSEGV",
        }[behaviour]
    )


def test_a_plan_that_names_no_bundle_that_is_there_fails(folder, oracle, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "macos")
    shutil.rmtree(broken / "head.aimodel")
    _, failed = verdict_of(broken, oracle, tmp_path / "out")
    assert "head.aimodel is missing" in failed["the target is read and runs"]


@pytest.fixture
def with_gpu(monkeypatch):
    """The host has a GPU, as far as the gate asks."""
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: None)


@pytest.mark.parametrize("wrong", [None, 3])
def test_the_answers_of_a_gpu_are_compared_id_by_id(oracle, with_gpu, wrong):
    asked = []

    def follow(dialogues):
        asked.append(dialogues)
        chosen = np.array([0, 0, *ANSWER])
        if wrong is not None:
            chosen[wrong] = 99
        return dict.fromkeys(dialogues, chosen)

    verdict = Verdict("gpu", "macos")
    gpu.gate_answers(verdict, Oracle.open(oracle), follow)
    assert asked == [{"short": PROMPT + ANSWER[:-1]}]
    failed = {check.name: check.found for check in verdict.checks if not check.passed}
    assert failed == ({"short: tokens": "2/3, first at position 3: 99 for 13"} if wrong else {})
    assert verdict.reasons == [] and verdict.checks


def test_an_oracle_without_a_short_dialogue_fails(tmp_path, with_gpu):
    verdict = Verdict("gpu", "macos")
    gpu.gate_answers(verdict, Oracle("abc", {"long": dialogue("long", [11] * 300)}, tmp_path), lambda ids: {})
    assert [check.name for check in verdict.checks if not check.passed] == ["dialogues"]


def test_a_mac_without_the_systems_runtime_has_no_gpu(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert host_gpu.why_no_gpu().startswith("this host has no Metal")
    if not ON_A_MAC:  # the package is that of another system
        monkeypatch.setattr(platform, "machine", lambda: "arm64")
        assert host_gpu.why_no_gpu().startswith("the Core AI runtime of macOS is not used: it needs macOS 27")


@pytest.mark.skipif(ON_A_MAC, reason="a Mac takes the options")
def test_the_options_for_the_gpu_reach_the_runtime(folder, monkeypatch):
    """Any options are refused off a Mac, so those that the stage asks for are seen to arrive."""
    monkeypatch.setattr(gate_gpu, "gpu_options", lambda: "for the GPU")
    opened = []

    def refuse(path, options):
        opened.append((path.name, options))
        raise UserError("opened")

    monkeypatch.setattr(driver, "open_bundle", refuse)
    with pytest.raises(UserError, match="opened"):
        gate_gpu.follow_on_gpu(str(folder), {})
    assert opened == [("head.aimodel", "for the GPU")]
    with (
        pytest.raises(RuntimeError, match="specialization_options is only available on macOS"),
        open_bundle(folder / "head.aimodel", "for the GPU"),
    ):
        pass


def conclude(verdict, out):
    out.mkdir()
    try:
        verdict.conclude(out)
    except GateFailed as failed:
        assert str(failed).startswith("gate g failed on t: ")
    return json.loads((out / "verdict.json").read_text())


def test_not_run_is_no_pass_and_a_failed_check_outweighs_it(tmp_path):
    verdict = Verdict("g", "t")
    verdict.not_run("no GPU")
    verdict.not_run("no compiler")
    first = conclude(verdict, tmp_path / "1")
    assert (first["verdict"], first["reason"], first["checks"]) == ("not_run", "no GPU; no compiler", [])
    verdict.check("one", True, "a", "a")
    assert conclude(verdict, tmp_path / "2")["verdict"] == "not_run"
    verdict.check("two", False, "a", "b")
    last = conclude(verdict, tmp_path / "3")
    assert (last["verdict"], last["reason"]) == ("fail", "two: expected a, found b")


def test_the_key_of_the_gate_follows_the_systems_tools(xcrun, monkeypatch, tmp_path):
    xcrun("none")
    without = closure.stage_host("gate_gpu")
    assert without["xcrun"] == "none" and "macos" in without
    xcrun("ok")
    first = closure.stage_host("gate_gpu")
    assert first["xcrun"] != "none" and first | {"xcrun": "none"} == without
    start = time.perf_counter()
    assert closure.stage_host("gate_gpu") == first
    assert (
        time.perf_counter() - start < 0.05
    )  # asked for while a workflow is parsed; milliseconds on a free machine
    developer = tmp_path / "Xcode.app/Contents/Developer"
    developer.mkdir(parents=True)
    (tmp_path / "Xcode.app/Contents/version.plist").write_text("27.0")
    monkeypatch.setenv("DEVELOPER_DIR", str(developer))
    assert closure.stage_host("gate_gpu")["xcrun"] not in ("none", first["xcrun"])
    monkeypatch.setenv("USE_LOCAL_COREAI", "1")
    assert closure.stage_host("gate_gpu")["macos"] == f"{without['macos']} without its Core AI"
    stages = [path.stem for path in (closure.PACKAGE / "stages").glob("gate_*.py")]
    assert {stage for stage in stages if "macos" in closure.stage_host(stage)} == {"gate_gpu"}
