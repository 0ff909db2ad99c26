"""Bundles that are compiled ahead of time, from the compiler's stage to the release that lists them."""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import release_inputs as given
from aot_inputs import pretend_xcrun

from workflow_scripts.coreai.architectures import Target
from workflow_scripts.errors import UserError
from workflow_scripts.files import canonical_json
from workflow_scripts.manifest import manifest_path, tree_path
from workflow_scripts.release import seal, verify
from workflow_scripts.release.chat import main as chat
from workflow_scripts.release.plan import Plan
from workflow_scripts.stages import runner

PHONE = Target("iOS", "h18p", "gpu", "27.0", False)
STEM = "tiny_decode"
TWIN = f"gpu-pipelined/{STEM}"
COMPILED = f"{TWIN}_aotc_h18p"
FLAT = "macos/tiny_core_aotc_h18p"


@pytest.fixture
def xcrun(monkeypatch):
    return lambda behaviour: pretend_xcrun(monkeypatch, behaviour)


def bundle(root: Path, stem: str, program: bytes, tables: str | None = None) -> Path:
    """Manifest of a bundle with all that a compiler reads."""
    metadata = canonical_json({"creatorDefinedMetadata": {"checkpoint": given.CHECKPOINT_DIGEST}})
    files = {
        "main.mlirb": program,
        "main.hash": hashlib.sha256(program).digest(),
        "metadata.json": metadata,
    }
    return given.result(root, "bundles", f"{stem}.aimodel", files, {"tables": tables} if tables else {})


def compiled(root: Path, source: Path, target: Target = PHONE) -> Path:
    """Manifest of the compiler's result."""
    stem = tree_path(source).stem
    output = root / "aot" / f"{stem}_aotc_{target.architecture}.manifest.json"
    runner.execute("aot", {"bundle": source}, asdict(target), output)
    return output


def packaged(root: Path, folder: str, **inputs: Path) -> Path:
    """Manifest of a release folder with a compiled bundle."""
    output = root / "compiled" / f"{folder}.manifest.json"
    runner.execute("package_compiled", inputs, {}, output)
    return output


@pytest.fixture
def parts(tmp_path, xcrun):
    """Everything for a release with a flat folder, a language bundle, and what is compiled of both."""
    xcrun("ok")
    inputs = given.package_inputs(tmp_path)
    core, decoder = (
        bundle(tmp_path, "tiny_core", b"core" * 50),
        bundle(tmp_path, STEM, b"decoder" * 50, given.digest(inputs["tables_0"])),
    )
    inputs["bundle_core"] = core
    language = given.package_params(
        folder=TWIN,
        driver="decode",
        bundles={"decoder": f"{STEM}.aimodel"},
        tables=[],
        tables_in={"folder": "macos", "tables": ["tiny_gather_raw"]},
        language={"functions": ["main"], "max_context_length": 64, "cache_minimum": 32, "compression": None},
    )
    macos = given.build_package(tmp_path, inputs, given.package_params())
    beside = {"checkpoint": inputs["checkpoint"], "bundle_decoder": decoder, "beside_0": inputs["tables_0"]}
    twin = given.build_package(tmp_path, beside, language)
    return {
        "checkpoint": inputs["checkpoint"],
        "gate_numbers": given.gate(tmp_path, "numbers"),
        "folder_macos": macos,
        f"folder_{TWIN}": twin,
        f"folder_{FLAT}": packaged(tmp_path, FLAT, compiled=compiled(tmp_path, core)),
        f"folder_{COMPILED}": packaged(tmp_path, COMPILED, compiled=compiled(tmp_path, decoder), twin=twin),
    }


def wanted(**changes):
    """Parameters of the release with both."""
    declared = {"form": "decode_tbl", "recipe": "fp16", "compute": "fp16"}
    entry = {"target": asdict(PHONE)}
    return {
        "model": "gemma-4-tiny",
        "slug": "gemma4_tiny",
        "folders": ["macos", TWIN, FLAT, COMPILED],
        "required_gates": ["numbers"],
        "artifacts": {
            f"{STEM}.aimodel": declared,
            f"{STEM}.h18p.aimodelc": declared,
            "tiny_gather_raw": {"form": "raw_tables", "recipe": None, "compute": None},
        },
        "compiled": {
            FLAT: {**entry, "bundle": "macos/tiny_core.aimodel"},
            COMPILED: {**entry, "bundle": f"{TWIN}/{STEM}.aimodel"},
        },
        "not_built": None,
        **changes,
    }


def document_of(release: Path) -> dict:
    return seal.open_sealed((release / "release.json").read_bytes())


def test_a_compiled_bundle_gets_a_folder_of_its_own(parts):
    folder = tree_path(parts[f"folder_{FLAT}"])
    assert {path.name for path in folder.iterdir()} == {
        "tiny_core.h18p.aimodelc",
        "aot.json",
        "provenance.json",
    }
    made_of = json.loads((folder / "provenance.json").read_text())["tiny_core.h18p.aimodelc"]
    assert (made_of["stage"], made_of["params"]) == ("aot", asdict(PHONE))
    assert not list(folder.rglob("measured*"))


def test_a_compiled_language_bundle_is_its_twin_but_for_the_bundle(parts):
    folder, twin = tree_path(parts[f"folder_{COMPILED}"]), tree_path(parts[f"folder_{TWIN}"])
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata == json.loads((twin / "metadata.json").read_text()) | {
        "assets": {"main": f"{STEM}.h18p.aimodelc"}
    }
    plan = json.loads((folder / "gemma4_plan.json").read_text())
    assert plan == json.loads((twin / "gemma4_plan.json").read_text()) | {
        "bundles": {"decoder": f"{STEM}.h18p.aimodelc"}
    }
    for path in (twin / "tokenizer").iterdir():
        assert (folder / "tokenizer" / path.name).read_bytes() == path.read_bytes()
    assert not (folder / f"{STEM}.aimodel").exists()


def test_a_twin_with_another_bundle_is_refused(tmp_path, parts):
    other = compiled(tmp_path / "other", bundle(tmp_path / "other", STEM, b"another decoder"))
    with pytest.raises(UserError, match=rf"{STEM}.h18p.aimodelc was compiled from another {STEM}.aimodel"):
        packaged(tmp_path / "other", COMPILED, compiled=other, twin=parts[f"folder_{TWIN}"])
    assert not (tmp_path / "other/compiled" / COMPILED).exists()


def test_a_release_lists_what_was_compiled(tmp_path, parts):
    release = given.build_release(tmp_path / "whole", parts, wanted())
    document = document_of(release)
    assert document["aot"][COMPILED] == {
        "bundle": f"{TWIN}/{STEM}.aimodel",
        "target": asdict(PHONE),
        "devices": ["iPhone 17 Pro"],
        "not_built": None,
        "tool": "coreai-build 0.0.0 (stand-in)",
    }
    assert document["tools"]["coreai-build"] == ["0.0.0 (stand-in)"]
    assert document["folders"][COMPILED]["contents"] == [f"{STEM}.h18p.aimodelc"]
    assert document["folders"][COMPILED]["tables"] == document["folders"][TWIN]["tables"]
    assert document["artifacts"][f"{STEM}.h18p.aimodelc"]["form"] == "decode_tbl"
    readme = (release / "README.md").read_text()
    for folder in (FLAT, COMPILED):
        assert folder in readme
    assert "iPhone 17 Pro" in readme
    script = (release / "compile.sh").read_text()
    assert f"compile {TWIN}/{STEM}.aimodel iOS h18p gpu 27.0" in script
    variants = json.loads((release / "catalog.json").read_text())["models"][0]["variants"]
    assert {platform: entry["path"] for platform, entry in variants.items()} == {
        "ios": COMPILED,
        "macos": TWIN,
    }
    assert verify.verify(release).problems == {}


def test_a_folder_is_counted_without_those_in_it(tmp_path, parts):
    folders = document_of(given.build_release(tmp_path / "whole", parts, wanted()))["folders"]
    release = tmp_path / "whole/release"
    below = [path for path in (release / "macos").rglob("*") if path.is_file()]
    assert folders["macos"]["files"] + folders[FLAT]["files"] == len(below)
    assert folders["macos"]["bytes"] + folders[FLAT]["bytes"] == sum(path.stat().st_size for path in below)


def test_what_this_host_cannot_compile_is_told_where_people_read_it(tmp_path, parts):
    reason = "no xcrun on this host"
    without = {name: path for name, path in parts.items() if "_aotc_" not in name}
    artifacts = {k: v for k, v in wanted()["artifacts"].items() if not k.endswith("c")}
    settings = wanted(folders=["macos", TWIN], artifacts=artifacts, not_built=reason)
    release = given.build_release(tmp_path / "whole", without, settings)
    entry = document_of(release)["aot"][FLAT]
    assert (entry["not_built"], entry["tool"]) == (reason, None)
    readme = (release / "README.md").read_text()
    assert FLAT in readme and f"not built: {reason}" in readme
    assert (release / "compile.sh").is_file()
    assert json.loads((release / "catalog.json").read_text())["models"][0]["variants"].keys() == {"macos"}
    assert verify.verify(release).problems == {}


def test_a_release_without_a_reason_or_with_half_of_it_is_refused(tmp_path, parts):
    half = {name: path for name, path in parts.items() if name != f"folder_{FLAT}"}
    with pytest.raises(UserError, match=f"{FLAT} is not built: no reason fits"):
        given.build_release(tmp_path / "whole", half, wanted(folders=["macos", TWIN, COMPILED]))
    assert not (tmp_path / "whole/release").exists()


def test_bundles_that_a_device_takes_for_one_another_are_refused(tmp_path, parts):
    twin = bundle(tmp_path / "same", "tiny_head", b"core" * 50)
    inputs = given.package_inputs(tmp_path / "same") | {"bundle_head": twin}
    macos = given.build_package(
        tmp_path / "same",
        {**inputs, "checkpoint": parts["checkpoint"]},
        given.package_params(bundles={"core": "tiny_core.aimodel", "head": "tiny_head.aimodel"}),
    )
    also = packaged(
        tmp_path / "same", "macos/tiny_head_aotc_h18p", compiled=compiled(tmp_path / "same", twin)
    )
    entry = {"target": asdict(PHONE), "bundle": "macos/tiny_head.aimodel"}
    settings = wanted(
        folders=[*wanted()["folders"], "macos/tiny_head_aotc_h18p"],
        compiled={**wanted()["compiled"], "macos/tiny_head_aotc_h18p": entry},
    )
    with pytest.raises(UserError, match="cannot tell them apart"):
        given.build_release(
            tmp_path / "whole",
            {**parts, "folder_macos": macos, "folder_macos/tiny_head_aotc_h18p": also},
            settings,
        )


def test_a_chat_with_what_is_compiled_for_a_phone_says_where_to_go(tmp_path, parts):
    for name in ("macos", TWIN, COMPILED):
        shutil.copytree(tree_path(parts[f"folder_{name}"]), tmp_path / "downloads" / name)
    assert Plan.open(tmp_path / "downloads" / COMPILED).driver == "decode"
    with pytest.raises(
        UserError, match=r"h18p.aimodelc is compiled for devices of one architecture.*\.aimodel"
    ):
        chat([str(tmp_path / "downloads" / COMPILED), "--prompt", "hello"])


@pytest.mark.parametrize("behaviour", ["reject", "crash", "full", "hollow", "nothing", "renamed"])
def test_a_compiler_that_fails_leaves_nothing_to_package(tmp_path, xcrun, behaviour):
    xcrun(behaviour)
    source = bundle(tmp_path, "tiny_core", b"core" * 50)
    with pytest.raises(UserError, match=r"tiny_core.aimodel for iOS h18p \(gpu\): "):
        compiled(tmp_path, source)
    left = {path.name for path in (tmp_path / "aot").iterdir()}
    assert not {name for name in left if "aimodelc" in name or name.endswith(manifest_path(Path("x")).name)}
