"""Compiling ahead of time: targets that cannot be right, and every way in which the compiler fails or seems not to.

The compiler is the stand-in `fakes/xcrun`; all around it is the real thing.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from tests.aot_inputs import NO_XCRUN, pretend_xcrun, write_bundle
from tests.conftest import ROOT
from workflow_scripts import closure, manifest
from workflow_scripts.coreai import aot, aot_host, compiled
from workflow_scripts.coreai.architectures import (
    ARCHITECTURES,
    DEVICES,
    TOO_OLD,
    Target,
    artifact_name,
    clashes,
    devices_of,
    own_problems,
    target_problems,
)
from workflow_scripts.errors import UserError
from workflow_scripts.files import tree_files
from workflow_scripts.release.compiled import shared_identities
from workflow_scripts.stages import runner

GPU = Target("iOS", "h18p", "gpu", "27.0", False)
ENGINE = replace(GPU, preferred_compute="neural-engine")
GIB = 1 << 30
PLAIN = {"linear_int4": False, "dynamic": False, "kernels": False}


@pytest.fixture
def xcrun(monkeypatch):
    return lambda behaviour, **more: pretend_xcrun(monkeypatch, behaviour, **more)


@pytest.fixture
def bundle(tmp_path):
    return write_bundle(tmp_path / "bundles")


def run_stage(bundle, target, home):
    """Run the stage as a rule does; returns the manifest's path."""
    output = home / "aot" / f"{artifact_name(bundle.stem, target)}{manifest.SUFFIX}"
    runner.execute("aot", {"bundle": bundle}, asdict(target), output)
    return output


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in tree_files(folder)} if folder.exists() else set()


# --- targets ---------------------------------------------------------------------------------------------------------


def test_the_tables_agree_with_each_other():
    for device in DEVICES:
        assert device.architecture in ARCHITECTURES[device.platform], device
        assert device.name in devices_of(
            replace(GPU, platform=device.platform, architecture=device.architecture)
        )
    assert not set(TOO_OLD) & {name for names in ARCHITECTURES.values() for name in names}
    for platform, names in ARCHITECTURES.items():
        assert len(set(names)) == len(names)
        assert all(own_problems(replace(GPU, platform=platform, architecture=name)) == [] for name in names)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"platform": "ios"}, "platform `ios` is none of iOS, macOS"),
        ({"architecture": "h16c"}, "architecture h16c belongs to macOS, not to iOS: iOS has h13g, "),
        ({"platform": "macOS"}, "architecture h18p belongs to iOS, not to macOS"),
        ({"architecture": "h81p"}, "there is no architecture `h81p`: iOS has h13g, h14g"),
        ({"architecture": "h15p"}, "of a device without Apple Intelligence"),
        ({"architecture": "iPhone19,2"}, "`iPhone19,2` is a device, whose architecture is h19p (iOS)"),
        ({"architecture": "iPhone 17 Pro"}, "is a device, whose architecture is h18p"),
        ({"preferred_compute": "ane"}, "preferred_compute `ane` is none of gpu, neural-engine, none"),
        ({"min_deployment_version": "26.4"}, "26.4 is before 27.0"),
        ({"min_deployment_version": "v27"}, "`v27` is no version such as `27.0`"),
    ],
)
def test_a_target_that_cannot_be_right_is_named(change, said):
    (problem,) = target_problems(replace(GPU, **change), **PLAIN)
    assert said in problem


@pytest.mark.parametrize(
    ("target", "graph", "said"),
    [
        (ENGINE, {"linear_int4": True}, "linear 4-bit weights do not compile for the Neural Engine"),
        (ENGINE, {"dynamic": True}, "a graph with changing shapes is not compiled for the Neural Engine"),
        (ENGINE, {"kernels": True}, "Metal kernels run on the GPU only"),
        (replace(GPU, expect_frequent_reshapes=True), {}, "crashes on the device when it is loaded"),
    ],
)
def test_a_graph_that_does_not_suit_a_target_is_named(target, graph, said):
    (problem,) = target_problems(target, **PLAIN | graph)
    assert said in problem


def test_what_the_published_release_compiles_is_taken():
    reshaped = replace(GPU, expect_frequent_reshapes=True)
    assert target_problems(reshaped, linear_int4=True, dynamic=True, kernels=False) == []
    assert target_problems(GPU, linear_int4=False, dynamic=False, kernels=True) == []
    assert target_problems(ENGINE, **PLAIN) == []


def test_two_targets_of_one_name_clash():
    assert clashes([GPU, replace(GPU, architecture="h19p")]) == []
    assert clashes([GPU, replace(GPU, architecture="h19p"), ENGINE]) == ["h18p"]


# --- whether to build at all -----------------------------------------------------------------------------------------


def test_without_xcrun_auto_says_so_and_require_stops(xcrun):
    xcrun(NO_XCRUN)
    assert not aot_host.aot_available()
    assert aot_host.why_not_built("auto") == "no xcrun on this host"
    with pytest.raises(
        UserError, match=r"aot.mode is `require`, but there is no xcrun on this host: install Xcode 27"
    ):
        aot_host.why_not_built("require")


def test_an_xcode_without_the_compiler_is_no_host_for_it(xcrun):
    xcrun("missing")
    assert aot_host.why_not_built("auto") == "no coreai-build in this host's Xcode"
    with pytest.raises(UserError, match="xcodebuild -downloadComponent MetalToolchain"):
        aot_host.why_not_built("require")


def test_with_the_compiler_both_build_and_off_does_not(xcrun):
    xcrun("ok")
    assert aot_host.aot_available()
    assert [aot_host.why_not_built(mode) for mode in ("require", "auto")] == [None, None]
    assert aot_host.why_not_built("off") == "aot.mode is off"
    with pytest.raises(UserError, match=r"aot.mode `yes` is none of require, auto, off"):
        aot_host.why_not_built("yes")


def test_the_question_is_cheap(xcrun):
    """It is asked while a workflow is planned."""
    xcrun("ok")
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        aot_host.aot_available()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
    code = "from workflow_scripts.coreai import aot_host, architectures; import sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "torch", "coreai", "transformers"} & set(modules)


# --- the stage -------------------------------------------------------------------------------------------------------


def test_a_bundle_compiled_for_the_gpu(bundle, xcrun, tmp_path):
    xcrun("ok")
    output = run_stage(bundle, GPU, tmp_path)
    tree = manifest.tree_path(output)
    inside = "gemma4_tiny_core.h18p.aimodelc"
    package = "main-h18p-delegates/MPSGraph/mpsExecutable.mpsgraphpackage"
    content = {
        *("main-h18p.mlirb", "main.hash", "metadata.json"),
        *(f"{package}/{name}" for name in ("manifest.plist", "original_model_0.mpsgraph", "resources.bin")),
        f"{package}/specialized_model_1.mpsgraph",
    }
    assert tree.name == "gemma4_tiny_core_aotc_h18p"
    assert files_below(tree) == {f"{inside}/{name}" for name in content} | {
        "aot.json",
        "measured_compile.json",
    }
    record = json.loads((tree / "aot.json").read_text())
    assert " ".join(record["command"]) == (
        "xcrun coreai-build compile gemma4_tiny_core.aimodel --output . --platform iOS --architecture h18p "
        "--preferred-compute gpu --min-deployment-version 27.0"
    )
    assert record["tool"] == "coreai-build 0.0.0 (stand-in)"
    assert record["target"] == asdict(GPU)
    assert record["files"] == {name: (tree / inside / name).stat().st_size for name in content}
    assert (record["delegates"], record["ane_regions"]) == (["MPSGraph"], 0)
    assert (record["resources_bytes"], record["resources_verdict"]) == (4096, "ok")
    assert record["main_hash"] == (bundle / "main.hash").read_bytes().hex()
    assert record["files_with_local_paths"] == []
    assert str(tmp_path) not in (tree / "aot.json").read_text()


def test_what_was_measured_is_outside_of_the_digest(bundle, xcrun, tmp_path):
    xcrun("slow", seconds=1)
    # In a process of its own, as a rule has it: what starts the tool counts, and a test's process is large.
    output = tmp_path / "slow/aot" / f"gemma4_tiny_core_aotc_h18p{manifest.SUFFIX}"
    stage = ["stage", "aot", "--input", f"bundle={bundle}", "--params", json.dumps(asdict(GPU))]
    places = ["--output", str(output), "--log", str(tmp_path / "slow.log")]
    subprocess.run([sys.executable, "-m", "workflow_scripts", *stage, *places], cwd=ROOT, check=True)
    tree = tmp_path / "slow/aot/gemma4_tiny_core_aotc_h18p"
    slow = manifest.read_manifest(output)
    measured = json.loads((tree / "measured_compile.json").read_text())
    assert 1.0 < measured["seconds"] < 20
    assert 100_000 < measured["peak_bytes"] < 1 << 30
    xcrun("ok")
    assert manifest.read_manifest(run_stage(bundle, GPU, tmp_path / "quick")).digest == slow.digest


def test_the_hint_of_reshapes_reaches_the_compiler():
    hinted = aot.command("x.aimodel", ".", replace(GPU, expect_frequent_reshapes=True))
    assert hinted == [*aot.command("x.aimodel", ".", GPU), "--expect-frequent-reshapes"]


def test_regions_of_the_neural_engine_are_counted_once_each(bundle, xcrun, tmp_path):
    """Every region is a folder, a file of weights and a program: three entries of one name."""
    xcrun("ok")
    tree = manifest.tree_path(run_stage(bundle, ENGINE, tmp_path))
    assert json.loads((tree / "aot.json").read_text())["ane_regions"] == 2
    assert len(list(tree.rglob("*ANE_region_*"))) == 6


@pytest.mark.parametrize(
    ("behaviour", "target", "said"),
    [
        ("fallback", ENGINE, r"ended with 0, but there are 0 regions .* \(its compiler complained 1 times"),
        ("crash", ENGINE, r"coreai-build died by SIGSEGV: .* \(ANECompilerOffline\) with decoders in chunks"),
        ("crash", GPU, "coreai-build died by SIGSEGV"),
        ("killed", GPU, r"was killed after 0 s, having used [\d,]+ bytes of memory"),
        ("full", GPU, r"the disk of the results was full \([\d,]+ bytes are free now\)"),
        ("reject", GPU, "Architecture 'h18p' is not supported for the requested deployment target: iOS 27.0"),
        ("missing", GPU, r'unable to find utility "coreai-build".*; or set aot.mode to `auto` or `off`'),
        (NO_XCRUN, GPU, r"no coreai-build: this host has no xcrun \(it comes with Xcode\)"),
        ("renamed", GPU, r"wrote gemma4_tiny_core.h13c.aimodelc instead of gemma4_tiny_core.h18p.aimodelc"),
        ("nothing", GPU, r"ended with 0 and wrote nothing instead of gemma4_tiny_core.h18p.aimodelc"),
        ("hollow", GPU, r"no MPSGraph delegate for the gpu in it \(none at all\)"),
    ],
)
def test_each_failure_has_its_message_and_leaves_nothing(bundle, xcrun, tmp_path, behaviour, target, said):
    xcrun(behaviour)
    before = files_below(tmp_path)
    with pytest.raises(UserError, match=said) as raised:
        run_stage(bundle, target, tmp_path)
    assert str(raised.value).startswith("gemma4_tiny_core.aimodel ")
    assert "iOS h18p" in str(raised.value)
    left = files_below(tmp_path) - before
    assert {name for name in left if not name.endswith((".lock", ".inputs.json"))} == set()


def test_an_earlier_result_does_not_outlive_a_failure(bundle, xcrun, tmp_path):
    xcrun("ok")
    output = run_stage(bundle, ENGINE, tmp_path)
    xcrun("fallback")
    with pytest.raises(UserError):
        run_stage(bundle, ENGINE, tmp_path)
    assert not output.exists()


def test_an_architecture_of_no_such_device_is_refused_though_the_compiler_takes_it(bundle, xcrun, tmp_path):
    xcrun("ok")
    wrong = replace(GPU, architecture="h16c")
    (tmp_path / "out").mkdir()
    subprocess.run(aot.command(str(bundle), str(tmp_path / "out"), wrong), check=True)
    assert (tmp_path / "out/gemma4_tiny_core.h16c.aimodelc").is_dir()
    with pytest.raises(UserError, match="h16c belongs to macOS, not to iOS"):
        run_stage(bundle, wrong, tmp_path)


def test_a_compiler_that_does_not_end_is_killed(bundle, xcrun, tmp_path):
    xcrun("slow", seconds=60)
    out = tmp_path / "out"
    out.mkdir()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"gemma4_tiny_core.aimodel for iOS h18p \(gpu\): .* within 0.2 s"):
        aot.compile_bundle(bundle, GPU, out, timeout=0.2)
    assert time.monotonic() - start < 10
    assert list(out.iterdir()) == []


def test_a_path_of_this_machine_in_the_output_is_told(bundle, xcrun, tmp_path):
    xcrun("ok")
    (bundle / "metadata.json").write_text(json.dumps({"source": str(bundle.parent / "x.py")}))
    tree = manifest.tree_path(run_stage(bundle, GPU, tmp_path))
    assert json.loads((tree / "aot.json").read_text())["files_with_local_paths"] == ["metadata.json"]


def test_only_a_bundle_is_compiled(bundle, xcrun, tmp_path):
    xcrun("ok")
    with pytest.raises(UserError, match=r"main.mlirb is no .aimodel folder"):
        aot.compile_bundle(bundle / "main.mlirb", GPU, tmp_path)


def test_the_key_follows_the_compiler_and_no_edit_of_the_plan(xcrun):
    xcrun(NO_XCRUN)
    without = closure.stage_host("aot")
    xcrun("ok")
    assert without["xcrun"] == "none" != closure.stage_host("aot")["xcrun"]
    names = {path.name for path in closure.stage_sources("aot")}
    assert "aot_host.py" not in names
    assert "aot.py" not in {path.name for path in closure.stage_sources("gate_gpu")}


# --- what a compiled bundle holds ------------------------------------------------------------------------------------


def test_the_load_limit():
    sizes = {
        "ok": [0, int(2.39 * GIB)],
        "warn": [int(2.39 * GIB) + 1, int(3.13 * GIB) - 1],
        "fail": [int(3.13 * GIB), 6 * GIB],
    }
    for verdict, examples in sizes.items():
        assert [compiled.resources_verdict(size) for size in examples] == [verdict] * 2


@pytest.mark.parametrize(("gib", "verdict"), [(2.5, "warn"), (3.2, "fail")])
def test_resources_beyond_the_load_limit(bundle, xcrun, tmp_path, caplog, gib, verdict):
    xcrun("ok", resources=int(gib * (1 << 20)))
    if verdict == "fail":
        with pytest.raises(
            UserError, match=r"resources.bin of 3.20 GiB, and devices refuse 3.13 GiB and more"
        ):
            aot.compile_bundle(bundle, GPU, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["bundles"]
    else:
        assert aot.compile_bundle(bundle, GPU, tmp_path).record["resources_verdict"] == "warn"
        assert "it has a resources.bin of 2.50 GiB; devices load up to 2.39 GiB for sure" in caplog.text


@pytest.fixture
def made(bundle, xcrun, tmp_path):
    """A compiled bundle to damage."""
    xcrun("ok")
    aot.compile_bundle(bundle, ENGINE, tmp_path)
    return tmp_path / "gemma4_tiny_core.h18p.aimodelc"


def test_a_program_that_is_not_there_or_empty_is_told(made):
    assert compiled.inspect(made, "h18p", "x").ane_regions == 2
    with pytest.raises(UserError, match=r"has no program main-h19p.mlirb"):
        compiled.inspect(made, "h19p", "x")
    (made / "main-h18p.mlirb").write_bytes(b"")
    with pytest.raises(UserError, match=r"has no program main-h18p.mlirb"):
        compiled.inspect(made, "h18p", "x")


def test_a_symlink_in_it_is_told(made):
    (made / "main.hash").unlink()
    (made / "main.hash").symlink_to(made / "main-h18p.mlirb")
    with pytest.raises(UserError, match=r"main.hash in it is a symlink"):
        compiled.inspect(made, "h18p", "x")


def test_regions_of_the_neural_engine_are_no_gpu_program(made):
    contents = compiled.inspect(made, "h18p", "x")
    with pytest.raises(UserError, match="2 regions are for the Neural Engine though the gpu was asked for"):
        compiled.check_contents(contents, GPU, "x", "")
    compiled.check_contents(contents, replace(GPU, preferred_compute="none"), "x", "")


def test_without_a_preference_delegates_are_not_needed(made):
    shutil.rmtree(made / "main-h18p-delegates")
    contents = compiled.inspect(made, "h18p", "x")
    compiled.check_contents(contents, replace(GPU, preferred_compute="none"), "x", "")
    with pytest.raises(UserError, match="no MPSGraph delegate"):
        compiled.check_contents(contents, ENGINE, "x", "")


def test_bundles_that_a_device_would_mix_up_are_told():
    records = {"a": {"main_hash": "1"}, "b": {"main_hash": "2"}, "c": {"main_hash": "1"}}
    assert shared_identities(records) == ["a and c"]
    unnamed = {"a": {"main_hash": None}, "b": {"main_hash": None}}
    assert shared_identities(unnamed) == []
