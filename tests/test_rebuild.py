"""`verify --rebuild`: what two builds of one release have in common, what they need not, and what is named."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import release_inputs as given
import yaml
from aot_inputs import NO_XCRUN, pretend_xcrun

from workflow_scripts.checks import rebuild
from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.checks.compare import Comparison, compare
from workflow_scripts.closure import ROOT
from workflow_scripts.config import DEFAULT
from workflow_scripts.coreai.architectures import Target
from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_file, write_atomic
from workflow_scripts.manifest import tree_path
from workflow_scripts.release import seal, statement, sums, verify
from workflow_scripts.stages import runner

PHONE = Target("iOS", "h18p", "gpu", "27.0", False)
PAD = Target("iOS", "h17g", "gpu", "27.0", False)
BUNDLES = {"tiny_core.aimodel": "bundle_core", "tiny_head.aimodel": "bundle_head"}
NO_COMPILER = "no xcrun on this host"


def bundle(root, stem, program):
    """Manifest of a bundle with all that a compiler reads."""
    metadata = json.dumps({"creatorDefinedMetadata": {"checkpoint": given.CHECKPOINT_DIGEST}})
    files = {
        "main.mlirb": program,
        "main.hash": hashlib.sha256(program).digest(),
        "metadata.json": metadata,
    }
    return given.result(root, "bundles", f"{stem}.aimodel", files)


def compiled(root, source, target):
    """Manifest of a folder with what is compiled of a bundle."""
    stem = tree_path(source).stem
    made = root / "aot" / f"{stem}_aotc_{target.architecture}.manifest.json"
    runner.execute("aot", {"bundle": source}, asdict(target), made)
    output = root / "compiled/macos" / made.name
    runner.execute("package_compiled", {"compiled": made}, {}, output)
    return output


def release(root, monkeypatch, *, compiler=True, core=b"core" * 50, device=None, target=PHONE, **changes):
    """A release with a gate that no release needs, and two bundles to be compiled ahead of time."""
    inputs = given.package_inputs(root)
    inputs |= {"bundle_core": bundle(root, "tiny_core", core)}
    inputs |= {"bundle_head": bundle(root, "tiny_head", b"head" * 50)}
    parts = {
        "checkpoint": inputs["checkpoint"],
        "folder_macos": given.build_package(root, inputs, given.package_params()),
        "gate_numbers": given.gate(root, "numbers"),
        "gate_device": given.gate(root, "device", *(device or ["not_run", "needs a phone"])),
    }
    declared = given.release_params()["artifacts"]
    folders, wanted = ["macos"], {}
    # In the order of a configuration, which is not the alphabet's.
    for name, wish in (("tiny_head.aimodel", PAD), ("tiny_core.aimodel", target)):
        folder = f"macos/{Path(name).stem}_aotc_{wish.architecture}"
        wanted[folder] = {"bundle": f"macos/{name}", "target": asdict(wish)}
        if compiler:
            pretend_xcrun(monkeypatch, "ok")
            parts[f"folder_{folder}"] = compiled(root, inputs[BUNDLES[name]], wish)
            folders.append(folder)
    params = given.release_params(
        folders=folders,
        artifacts=declared,
        compiled=wanted,
        not_built=None if compiler else NO_COMPILER,
        **changes,
    )
    given.build_release(root / "whole", parts, params)
    return root / "whole/release"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Make a release: `make("a", compiler=False)`."""
    return lambda name, **changes: release(tmp_path / name, monkeypatch, **changes)


def edit(release, change):
    """Let a release's record say something else, as if another checkout had built it so."""
    document = seal.open_sealed((release / "release.json").read_bytes())
    change(document)
    for entry in document["files"]:
        file = release / entry["path"]
        entry |= {"sha256": sha256_file(file), "size": file.stat().st_size}
    digests = {entry["path"]: entry["sha256"] for entry in document["files"]}
    write_atomic(release / "release.json", seal.sealed_text(document))
    digests["release.json"] = sha256_file(release / "release.json")
    write_atomic(release / "SHA256SUMS", sums.format_sums(digests))
    write_atomic(release / "statement.json", statement.statement_text(document, digests))
    assert verify.verify(release).problems == {}


def listed(release):
    return len(json.loads((release / "release.json").read_text())["files"])


# --- comparing two releases ----------------------------------------------------------------------


def test_equal_releases_have_no_difference_and_a_gate_that_was_run_for_neither_is_said(make):
    first, second = make("first"), make("second")
    neither = "not run for the release nor here (needs a phone)"
    assert compare(first, second) == Comparison({}, {"gate device": neither}, listed(first), identical=True)


def test_a_file_that_differs_is_named_with_the_byte(make):
    first, second = make("first"), make("second", core=b"core" * 49 + b"corE")
    found = compare(first, second).differences
    assert "from byte 199 on: b'ecorecorecorecorecore' against" in found["macos/tiny_core.aimodel/main.mlirb"]
    assert "macos/tiny_core_aotc_h18p/aot.json" in found  # what is made of it
    assert found["release.json"].startswith("differs at artifacts/tiny_core.aimodel/digest: ")
    assert not {"macos/tiny_head.aimodel/main.mlirb", "macos/tokenizer/tokenizer.json"} & found.keys()


def test_a_file_of_one_release_only_is_named(make):
    first, second = make("first"), make("second")
    for release, name in ((first, "macos/more.txt"), (second, "macos/other.txt")):
        (release / name).write_text("more")
        edit(release, lambda document, name=name: document["files"].append({"path": name}))
    found = compare(first, second).differences
    assert found["macos/more.txt"] == "is in the release only"
    assert found["macos/other.txt"] == "is in the rebuild only"
    assert "release.json" not in found  # but for the files, which are named by themselves, it says the same


@pytest.mark.parametrize("compilers", [(True, False), (False, True), (False, False)])
def test_what_one_host_cannot_compile_is_left_out_and_said(make, compilers):
    first, second = (make(str(i), compiler=compiler) for i, compiler in enumerate(compilers))
    found = compare(first, second)
    places = [place for place, there in zip(("for the release", "here"), compilers, strict=True) if not there]
    reason = f"not built {' nor '.join(places)} ({NO_COMPILER})"
    folders = ("macos/tiny_core_aotc_h18p", "macos/tiny_head_aotc_h17g")
    assert found.differences == {}
    assert {name: why for name, why in found.left_out.items() if "aotc" in name} == dict.fromkeys(
        folders, reason
    )
    assert found.identical == (compilers[0] == compilers[1])
    readme_differs = not found.identical
    assert found.files == min(listed(first), listed(second)) - readme_differs


def test_what_is_left_out_hides_no_other_difference(make):
    first = make("first", compiler=False)
    second = make("second", core=b"another core" * 20)
    found = compare(first, second).differences
    assert found.keys() == {
        "macos/tiny_core.aimodel/main.mlirb",
        "macos/tiny_core.aimodel/main.hash",
        "macos/provenance.json",
        "release.json",
    }
    assert "aotc" not in found["release.json"]


def test_a_target_that_was_never_asked_for_is_a_difference_though_nothing_is_compiled(make):
    first, second = make("first", compiler=False), make("second", compiler=False, target=PAD)
    found = compare(first, second)
    assert "differs at aot/macos/tiny_core_aotc_h17g: nothing against" in found.differences["release.json"]
    assert not [name for name in found.left_out if "core_aotc" in name]
    edit(first, lambda document: [entry.update(devices=["a phone"]) for entry in document["aot"].values()])
    assert (
        "aot/macos/tiny_core_aotc_h18p/devices"
        in compare(first, make("3", compiler=False)).differences["release.json"]
    )


def test_a_gate_that_one_host_cannot_run_is_left_out_and_said(make):
    first, second = make("first", device=["not_run", "needs a phone"]), make("second", device=["pass"])
    for one, other, where in ((first, second, "for the release"), (second, first, "here")):
        found = compare(one, other)
        assert found.differences == {} and not found.identical
        assert found.left_out == {"gate device": f"not run {where} (needs a phone)"}


def test_each_release_has_its_own_reason(make):
    first, second = make("first"), make("second", device=["not_run", "no phone is near"])
    expected = "not run for the release (needs a phone) nor here (no phone is near)"
    assert compare(first, second).left_out["gate device"] == expected


def test_a_verdict_on_other_inputs_is_a_difference_though_the_gate_was_not_run(make):
    first, second = make("first"), make("second", device=["pass"])
    edit(second, lambda document: document["gates"]["device"]["inputs"].update(bundle="0" * 64))
    place = f"differs at gates/device/inputs/bundle: nothing against '{'0' * 64}'"
    assert compare(first, second).differences["release.json"] == place


def test_a_needed_gate_and_a_tool_are_compared_as_they_are(make):
    first, second = make("first", compiler=False), make("second")

    def other(document):
        document["gates"]["numbers"]["tokens"]["found"] = [5, 6, 107]
        document["tools"]["numpy"] = ["2.0", "2.1"]

    edit(second, other)
    (found,) = compare(first, second).differences.items()
    assert found == (
        "release.json",
        "differs at gates/numbers/tokens/found: [5, 6, 106] against [5, 6, 107] (and 1 more)",
    )


def test_a_text_that_does_not_follow_from_its_record_is_named_whatever_is_left_out(make):
    first, second = make("first", compiler=False), make("second")
    (first / "README.md").write_text((first / "README.md").read_text() + "\nBy hand.\n")
    (first / "compile.sh").write_text("#!/bin/sh\nexit 0\n")
    edit(first, lambda document: None)
    found = compare(first, second).differences
    assert found.keys() == {"README.md", "compile.sh"} and "from byte" in found["compile.sh"]


def test_records_in_another_form_are_named(make):
    first, second = make("first", device=["pass"]), make("second", device=["pass"])
    document = json.loads((second / "statement.json").read_text())
    (second / "statement.json").write_text(json.dumps(document))
    assert compare(first, second).differences.keys() == {"statement.json"}


# --- what people read ----------------------------------------------------------------------------


def test_the_report_says_what_was_not_compared_what_differs_and_the_outcome():
    left_out = {"ios/a": "not built here (no xcrun)", "gate g": "not run here (no GPU)"}
    left_out["ios/b"] = left_out["ios/a"]
    assert rebuild.report(Comparison({"x": "differs"}, left_out, 7, identical=False)) == [
        "not compared: ios/a, ios/b, because not built here (no xcrun)",
        "not compared: gate g, because not run here (no GPU)",
        "x differs",
        "not the same: 1 differ, 7 files are equal",
    ]
    whole = rebuild.report(Comparison({}, {}, 7, identical=True))
    assert whole == [
        "the same: 7 files are equal, and so is SHA256SUMS itself; measured.json has figures of one host"
    ]


def test_progress_is_a_line_per_job_with_how_many_are_done(capsys):
    show = rebuild.Progress()
    for line in [
        "  Date: today",
        "total                   5",
        "  text: built: 8 files, 4,041,458 bytes, 0.2 s",
        "Finished jobid: 2 (Rule: checkpoint)",
        "1 of 5 steps (20%) done",
        "  core: layers 3/10, about 20 s left",
    ]:
        show(line)
    assert capsys.readouterr().err.splitlines() == [
        "0/5  text: built: 8 files, 4,041,458 bytes, 0.2 s",
        "1/5  core: layers 3/10, about 20 s left",
    ]


# --- the configuration ---------------------------------------------------------------------------


def test_the_model_file_of_a_release_is_found(tmp_path):
    assert rebuild.find_config("gemma-4-tiny", ROOT / "config") == DEFAULT
    assert rebuild.find_config("gemma-4-e2b", ROOT / "config").name == "gemma-4-e2b.yaml"
    with pytest.raises(UserError, match=r"of model gemma-5: name it with --configfile"):
        rebuild.find_config("gemma-5", ROOT / "config")
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("model: mine\n")
    with pytest.raises(UserError, match=r"several files .*mine \(a.yaml, b.yaml\)"):
        rebuild.find_config("mine", tmp_path)


def test_a_local_checkpoint_lies_where_it_did_and_no_compiler_is_needed(tmp_path, monkeypatch):
    pretend_xcrun(monkeypatch, NO_XCRUN)
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: mine\ncheckpoint: {source: resources/gemma-4-tiny}\naot: {mode: require}\n")
    settings = rebuild.settings_of(mine, "mine")
    assert settings == {
        "model": "mine",
        "checkpoint": {"source": str(ROOT / "resources/gemma-4-tiny")},
        "aot": {"mode": "auto"},
    }
    pretend_xcrun(monkeypatch, "ok")
    assert rebuild.settings_of(mine, "mine")["aot"] == {"mode": "require"}
    hub = ROOT / "config/gemma-4-e2b.yaml"
    assert rebuild.settings_of(hub, "gemma-4-e2b") == yaml.safe_load(hub.read_text())
    with pytest.raises(UserError, match=r"mine.yaml is of model mine, the release of gemma-4-tiny"):
        rebuild.settings_of(mine, "gemma-4-tiny")
    with pytest.raises(UserError, match=r"absent.yaml cannot be read"):
        rebuild.settings_of(tmp_path / "absent.yaml", "mine")


# --- the command ---------------------------------------------------------------------------------


def test_a_release_that_is_not_as_released_is_not_built_again(make, capsys):
    first = make("first")
    (first / "README.md").write_text("another")
    assert verify.main([str(first), "--rebuild"]) == 1
    assert "building" not in capsys.readouterr().out


def test_options_of_a_rebuild_need_one(make, tmp_path, capsys):
    first = make("first")
    with pytest.raises(SystemExit):
        verify.main([str(first), "--workdir", str(tmp_path)])
    assert "--configfile and --workdir are for --rebuild" in capsys.readouterr().err
    with pytest.raises(UserError, match="absent is not a folder"):
        verify.main([str(first), "--rebuild", "--workdir", str(tmp_path / "absent")])


@pytest.mark.end_to_end
def test_a_release_is_built_again_and_compared(tmp_path, capsys):
    """The tables' release alone: real jobs in a real copy, in seconds."""
    declared = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    small = {
        "folders": {name: None for name in declared["folders"] if name != "ios-frontend"},
        "gates": {"required": [], "reported": [], "evidence": []},
        "artifacts": {"head_fp16": None},
    }
    configfile, project, workdir = tmp_path / "small.yaml", tmp_path / "project", tmp_path / "work"
    configfile.write_text(yaml.safe_dump(small))
    workdir.mkdir()
    copy_project(project)
    options = ["release", "--configfile", str(configfile)]
    build(project, *options, environment={"GEMMA4_STORE": "off"})
    record = project / "results/gemma-4-tiny/release/release.json"
    whole = record.read_bytes()
    record.write_bytes(b"{}")  # a damaged result is noticed, whatever asks for it, and made again
    assert "it will be made again" in build(project, *options, environment={"GEMMA4_STORE": "off"})
    assert record.read_bytes() == whole
    built = Path(shutil.move(project / "results/gemma-4-tiny/release", tmp_path / "a dównload"))
    command = [str(built), "--rebuild", "--configfile", str(configfile), "--workdir", str(workdir)]
    assert verify.main(command) == 0
    shown = capsys.readouterr()
    assert "\nthe same: " in shown.out and "SHA256SUMS itself" in shown.out
    assert "1/5  gemma4_gather_raw: built: 7 files" in shown.err
    edit(built, lambda document: document["tools"].update(numpy=["1.0"]))
    assert verify.main(command) == 1
    assert "release.json differs at tools/numpy: ['1.0'] against" in capsys.readouterr().out
    configfile.write_text(yaml.safe_dump({**small, "checkpoint": {"source": "nowhere"}}))
    with pytest.raises(UserError, match=r"(?s)`snakemake release .*` failed in .*nowhere"):
        verify.main(command)
    assert list(workdir.iterdir()) == []
