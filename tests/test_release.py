"""The package and release stages: what ships, what is recorded, and what is refused."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import release_inputs as given

from workflow_scripts.closure import ROOT
from workflow_scripts.coreai.chunk_bundles import read_plan
from workflow_scripts.errors import UserError
from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.manifest import manifest_path, read_manifest, tree_path
from workflow_scripts.release import seal
from workflow_scripts.release.gate_results import not_run
from workflow_scripts.release.package import describe, read_text_config
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.readme import human_size
from workflow_scripts.release.tokenizer import ChatTokenizer


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def package(root: Path, inputs: dict[str, Path], **changes: object) -> Path:
    return tree_path(given.build_package(root, inputs, given.package_params(**changes)))


@pytest.fixture()
def inputs(tmp_path: Path) -> dict[str, Path]:
    return given.package_inputs(tmp_path)


@pytest.fixture()
def ready(tmp_path: Path) -> dict[str, Path]:
    return given.release_inputs(tmp_path)


# --- package -------------------------------------------------------------------------------------


def test_a_folder_holds_the_published_names_and_no_host_figures(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    folder = package(tmp_path, inputs)
    assert names(folder) == {
        "tiny_core.aimodel/main.mlirb",
        "tiny_core.aimodel/metadata.json",
        "tiny_head.aimodel/main.mlirb",
        "tiny_head.aimodel/metadata.json",
        "tiny_gather_raw/ple.i8",
        "tiny_gather_raw/meta.json",
        "gemma4_plan.json",
        "provenance.json",
        *(f"tokenizer/{name}" for name in given.TOKENIZER_FILES),
    }
    assert (folder / "tiny_head.aimodel/main.mlirb").read_bytes() == b"head" * 50
    for name in given.TOKENIZER_FILES:
        assert (folder / "tokenizer" / name).read_bytes() == (given.TINY / name).read_bytes()


def test_a_folder_moved_away_tells_a_host_all_it_needs(tmp_path: Path, inputs: dict[str, Path]) -> None:
    moved = shutil.move(package(tmp_path, inputs), tmp_path / "elsewhere")
    plan, config = Plan.open(Path(moved)), read_text_config(tree_path(inputs["checkpoint"]))
    assert (plan.driver, plan.context, plan.stop_token_ids) == ("hostcache", 64, [1, 106])
    assert plan.bundles == {"core": "tiny_core.aimodel", "head": "tiny_head.aimodel"}
    assert plan.tables == ["tiny_gather_raw"] and plan.tables_elsewhere(Path(moved)) == set()
    assert ChatTokenizer.open(Path(moved) / plan.tokenizer).stop_token_ids == (1, 106)
    owners = {layer for layers in plan.text["slots"].values() for layer in layers}
    assert owners == set(range(config.num_hidden_layers - config.num_kv_shared_layers))
    assert all(config.layer_types[i] == kind for kind, layers in plan.text["slots"].items() for i in layers)
    for name in (
        "head_dim",
        "global_head_dim",
        "sliding_window",
        "vocab_size",
        "hidden_size",
        "num_key_value_heads",
    ):
        assert plan.text[name] == getattr(config, name)


def test_a_plan_whose_bundle_is_missing_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    folder = package(tmp_path, inputs)
    shutil.rmtree(folder / "tiny_head.aimodel")
    with pytest.raises(UserError, match=r"tiny_head\.aimodel"):
        Plan.open(folder)
    (folder / "gemma4_plan.json").write_text('{"format": 2}')
    with pytest.raises(UserError, match="not a plan"):
        Plan.open(folder)
    (folder / "gemma4_plan.json").unlink()
    with pytest.raises(UserError, match=r"no gemma4_plan\.json"):
        Plan.open(folder)


@pytest.fixture()
def borrower(tmp_path: Path, inputs: dict[str, Path]) -> Path:
    """The folder `phone`, whose plan reads the tables of the folder `front`, which lies beside it."""
    tables = inputs.pop("tables_0")
    params = given.package_params(folder="front", bundles={}, driver=None, tokenizer=False)
    given.build_package(tmp_path, {"checkpoint": inputs["checkpoint"], "tables_0": tables}, params)
    inputs["beside_0"] = tables
    other = {"folder": "front", "tables": ["tiny_gather_raw"]}
    return package(tmp_path, inputs, folder="phone", tables=[], tables_in=other)


def test_a_plan_names_the_tables_of_the_folder_beside_it(borrower: Path) -> None:
    plan = Plan.open(borrower)
    assert plan.tables == ["../front/tiny_gather_raw"]
    assert (borrower / plan.tables[0] / "ple.i8").is_file()
    assert not any("gather_raw" in name for name in names(borrower))
    assert plan.tables_elsewhere(borrower) == {(borrower.parent / "front").resolve()}


def test_a_decoder_in_chunks_has_a_plan_of_its_own(tmp_path: Path, inputs: dict[str, Path]) -> None:
    names = [f"tiny_chunk{number}.aimodel" for number in (1, 2, 3)]
    for number in (1, 2, 3):
        inputs[f"bundle_chunk{number}"] = given.bundle(tmp_path, f"chunk{number}", b"chunk")
    del inputs["bundle_core"]
    folder = package(
        tmp_path,
        inputs,
        driver="chunks",
        bundles={"chunk1": names[0], "chunk2": names[1], "chunk3": names[2], "head": "tiny_head.aimodel"},
        chunks={"bundles": names, "layers": [[0, 3], [3, 5], [5, 10]], "compute": "fp16"},
    )
    plan = read_plan(folder / "gemma4_chunks_plan.json")
    assert [(chunk["bundle"], chunk["layers"]) for chunk in plan["chunks"]] == list(
        zip(names, ([0, 3], [3, 5], [5, 10]), strict=True)
    )
    assert plan["context"] == Plan.open(folder).context == 64
    assert all((folder / chunk["bundle"]).is_dir() for chunk in plan["chunks"])


def test_a_folder_without_the_one_that_holds_its_tables_says_where_they_lie(
    tmp_path: Path, borrower: Path
) -> None:
    alone = Path(shutil.copytree(borrower, tmp_path / "elsewhere" / "phone"))
    with pytest.raises(
        UserError, match=rf"folder `front` of the same release; put that folder beside {alone.resolve()}$"
    ):
        Plan.open(alone)
    shutil.copytree(borrower.parent / "front", alone.parent / "front")
    assert Plan.open(alone).tables == Plan.open(borrower).tables


def test_a_gate_knows_the_tables_that_the_plan_leads_to(
    tmp_path: Path, inputs: dict[str, Path], borrower: Path
) -> None:
    """Else its verdict would stay while the tables it was found with change."""

    def failed(folder: Path, tables_folder: Path | None) -> list[str]:
        verdict = Verdict("tokens", folder.name)
        gate_tables_folder(verdict, Plan.open(folder).tables_elsewhere(folder), tables_folder)
        return [check.name for check in verdict.checks if not check.passed]

    front, copy = borrower.parent / "front", shutil.copytree(borrower.parent / "front", tmp_path / "front")
    assert failed(borrower, front) == []
    assert failed(borrower, copy) == failed(borrower, None) == ["plan: folder of the tables"]
    del inputs["beside_0"]
    own = package(tmp_path, inputs, tables=[])
    assert failed(own, None) == []
    assert failed(own, front) == ["plan: folder of the tables"]


def test_without_driver_there_is_no_plan_and_without_tokenizer_none(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    folder = package(tmp_path, inputs, driver=None, tokenizer=False)
    assert {path.name for path in folder.iterdir()} == {
        "tiny_core.aimodel",
        "tiny_head.aimodel",
        "tiny_gather_raw",
        "provenance.json",
    }
    with pytest.raises(UserError, match="tokenizer: true"):
        package(tmp_path, inputs, tokenizer=False)


def test_a_checkpoint_without_chat_template_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    source = tree_path(inputs["checkpoint"]) / "source"
    (source / "chat_template.jinja").unlink()
    made_of = read_manifest(inputs["checkpoint"]).ingredients
    from workflow_scripts.manifest import write_manifest

    write_manifest(source.parent, made_of)
    inputs["tables_0"] = given.tables(tmp_path, given.digest(inputs["checkpoint"]))
    with pytest.raises(UserError, match=r"chat template.*chat_template\.jinja"):
        package(tmp_path, inputs)
    assert not (tmp_path / "package" / "macos").exists()


def test_tables_of_another_checkpoint_are_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    inputs["tables_0"] = given.tables(tmp_path, "f" * 64)
    with pytest.raises(UserError, match="gather_raw was made from another checkpoint"):
        package(tmp_path, inputs)


def test_an_edit_that_changes_no_byte_of_a_bundle_changes_no_folder(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    """Else every comment in export code would repeat the gates of the folder."""
    from dataclasses import replace

    from workflow_scripts.manifest import write_manifest

    first = given.build_package(tmp_path, inputs, given.package_params())
    before = given.digest(first)
    core = tree_path(inputs["bundle_core"])
    write_manifest(core, replace(read_manifest(inputs["bundle_core"]).ingredients, code="1" * 64))
    assert given.digest(given.build_package(tmp_path, inputs, given.package_params())) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bundles": {"core": "same.aimodel", "head": "same.aimodel"}}, "same.aimodel` is published twice"),
        ({"bundles": {"core": "tokenizer", "head": "b.aimodel"}}, "`tokenizer` cannot be a published name"),
        ({"bundles": {"core": "../a.aimodel", "head": "b.aimodel"}}, "cannot be a published name"),
        ({"bundles": {"core": "a", "head": "b.aimodel"}}, "keeps its suffix"),
        ({"bundles": {"core": "a.aimodel"}}, "bundle_head must be both"),
        ({"tables": ["a", "b"]}, "tables_1 must be both"),
    ],
)
def test_names_that_cannot_be_published(
    tmp_path: Path, inputs: dict[str, Path], changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        package(tmp_path, inputs, **changes)


# --- release -------------------------------------------------------------------------------------


def release(root: Path, inputs: dict[str, Path], **changes: object) -> Path:
    return given.build_release(root, inputs, given.release_params(**changes))


def test_every_file_is_listed_once_and_rightly(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)
    assert listed.keys() == names(folder) - {"SHA256SUMS", "measured.json", "statement.json"}
    assert list(listed) == sorted(listed)
    for name, expected in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected
    entries = {entry["path"]: entry for entry in json.loads((folder / "release.json").read_text())["files"]}
    assert entries.keys() == listed.keys() - {"release.json"}
    for name, entry in entries.items():
        assert (entry["sha256"], entry["size"]) == (listed[name], (folder / name).stat().st_size)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="coreutils are not installed")
def test_coreutils_can_check_it(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    check = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=folder, check=True)


def test_the_record_says_what_it_was_made_of(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    record = seal.open_sealed((folder / "release.json").read_bytes())
    assert (record["format"], record["model"], record["slug"]) == (1, "gemma-4-tiny", "gemma4_tiny")
    assert record["checkpoint"]["digest"] == "ab" * 32
    assert record["checkpoint"]["result_digest"] == given.digest(ready["checkpoint"])
    assert record["recipes"]["fp16"]["total"] == {"snr_db": 74.5}
    core = record["artifacts"]["tiny_core.aimodel"]
    assert core["digest"] == given.digest(tmp_path / "export/core_fp16.aimodel.manifest.json")
    assert (core["form"], core["recipe"], core["compute"], core["folders"]) == (
        "hostcache",
        "fp16",
        "gpu",
        ["macos"],
    )
    assert record["artifacts"]["tiny_gather_raw"]["inputs"] == {
        "checkpoint": given.digest(ready["checkpoint"])
    }
    numbers = record["gates"]["numbers"]
    assert (numbers["verdict"], numbers["required"], numbers["bounds"]) == (
        "pass",
        True,
        {"max_abs_error": 1e-4},
    )
    assert numbers["tokens"]["found"] == [5, 6, 106]
    assert record["tools"]["numpy"] == ["2.0"] and "jinja2" in record["tools"]
    measured = seal.open_sealed((folder / "measured.json").read_bytes())
    assert measured["gates"]["numbers"] == {"max_abs_error": 3.25e-05}


def test_two_builds_elsewhere_give_the_same_bytes(tmp_path: Path) -> None:
    sums = []
    for name in ("one", "two b é"):
        root = tmp_path / name
        folder = release(root, given.release_inputs(root))
        sums.append((folder / "SHA256SUMS").read_bytes())
        for path in folder.rglob("*"):
            assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes()
    assert sums[0] == sums[1]


def test_host_figures_change_neither_sums_nor_digest(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    before = (folder / "SHA256SUMS").read_bytes(), given.digest(manifest_path(folder))
    other = given.write_files(tmp_path / "gate/numbers", {"measured.json": '{"max_abs_error": 9e-05}'})
    from workflow_scripts.manifest import write_manifest

    write_manifest(other, read_manifest(manifest_path(other)).ingredients)
    folder = release(tmp_path, ready)
    assert ((folder / "SHA256SUMS").read_bytes(), given.digest(manifest_path(folder))) == before
    assert "9e-05" in (folder / "measured.json").read_text()


def test_the_readme_tells_a_downloader_what_they_need(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    text = (folder / "README.md").read_text()
    for wanted in (
        "nobody/gemma-4-tiny",
        "74.5 dB",
        "`macos/`",
        "`tiny_core.aimodel`",
        "python -m workflow_scripts chat RELEASE/macos --prompt",
        "sha256sum -c SHA256SUMS",
        "| `numbers` | tiny_core.aimodel | pass | yes | max_abs_error 0.0001 |",
        "needs a Mac | and a phone",
        "xcrun coreai-build",
        "`apache-2.0` (https://example.org/licence) in `LICENSE`",
    ):
        assert wanted in text
    # The gate `device` is there and says why it was not run.
    assert "Runs on the GPU or the Neural Engine: no gate above is one" in text
    assert "| `macos/` | macOS | - |" in text and "run on a CPU" not in text
    assert "language bundle" not in text
    assert (folder / "LICENSE").read_text() == "Use it as you like.\n"
    assert "3.25e-05" not in text and "\n\n\n" not in text.partition("```python")[0]
    table = [line for line in text.splitlines() if line.startswith("| `tiny_")]
    assert all(line.replace("\\|", "").count("|") == 7 for line in table)


def test_a_local_checkpoint_without_licence_says_so(tmp_path: Path) -> None:
    plain = given.checkpoint(tmp_path, {"source/README.md": "# no head\n"}, given.LOCAL)
    source = tree_path(plain)
    (source / "source/LICENSE").unlink()
    from workflow_scripts.manifest import write_manifest

    write_manifest(source, read_manifest(plain).ingredients)
    inputs = {"checkpoint": plain, "bundle_core": given.bundle(tmp_path, "core", b"c")}
    params = given.package_params(bundles={"core": "c.aimodel"}, tables=[])
    release_inputs = {
        "checkpoint": plain,
        "folder_macos": given.build_package(tmp_path, inputs, params),
        "gate_numbers": given.gate(tmp_path, "numbers"),
    }
    folder = release(tmp_path, release_inputs, artifacts={})
    text = (folder / "README.md").read_text()
    assert "text decoder of a local checkpoint" in text
    assert "state no licence" in text and "the Neural Engine or a device: no gate above" in text


@pytest.mark.parametrize(
    ("verdict", "reason", "message"),
    [
        (
            "fail",
            "position 3: 17 is not 18",
            r"`numbers` on tiny_core\.aimodel: fail \(position 3: 17 is not 18\)",
        ),
        (
            "not_run",
            "no GPU on this host",
            r"`numbers` on tiny_core\.aimodel: not_run \(no GPU on this host\)",
        ),
        ("maybe", None, "says 'maybe'"),
    ],
)
def test_a_required_gate_that_did_not_pass_stops_the_release(
    tmp_path: Path, ready: dict[str, Path], verdict: str, reason: str | None, message: str
) -> None:
    ready["gate_numbers"] = given.gate(tmp_path, "numbers", verdict, reason)
    with pytest.raises(UserError, match=message):
        release(tmp_path, ready)
    assert not (tmp_path / "release").exists()


def test_a_reported_gate_may_be_not_run_but_must_not_fail(tmp_path: Path, ready: dict[str, Path]) -> None:
    ready["gate_gpu_macos"] = given.gate(tmp_path, "gpu", "not_run", "no Metal here")
    ready["gate_kernels_core"] = given.gate(tmp_path, "kernels")
    folder = release(tmp_path, ready)
    record = json.loads((folder / "release.json").read_text())["gates"]["gpu_macos"]
    assert (record["verdict"], record["reason"], record["required"]) == ("not_run", "no Metal here", False)
    text = (folder / "README.md").read_text()
    assert "- `gpu_macos` on tiny_core.aimodel: no Metal here\n" in text
    assert "- Runs on the Neural Engine: no gate" in text and "run on a CPU" in text
    assert "list of what the Neural Engine runs" not in text and "gemma4_chunks_plan.json" not in text
    ready["gate_ane_core"] = given.gate(tmp_path, "ane")
    text = (release(tmp_path, ready) / "README.md").read_text()
    assert "- Runs on the Neural Engine: no gate" in text and "list of what the Neural Engine runs" in text
    ready["gate_gpu_macos"] = given.gate(tmp_path, "gpu", "fail", "position 3: 17 is not 18")
    with pytest.raises(UserError, match=r"`gpu_macos` on tiny_core\.aimodel: fail \(position 3"):
        release(tmp_path, ready)


def test_the_end_of_a_run_says_what_was_not_run(tmp_path: Path, ready: dict[str, Path]) -> None:
    gpu = given.gate(tmp_path, "gpu", "not_run", "no Metal here")
    assert not_run([ready["gate_numbers"], gpu]) == ["not run: gate gpu on tiny_core.aimodel: no Metal here"]


def test_all_lacking_gates_are_named_at_once(tmp_path: Path, ready: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"`device` on .*not_run \(needs a Mac.*`tokens` is missing"):
        release(tmp_path, ready, required_gates=["device", "numbers", "tokens"])


def test_a_refused_release_leaves_no_manifest_of_an_earlier_one(
    tmp_path: Path, ready: dict[str, Path]
) -> None:
    release(tmp_path, ready)
    with pytest.raises(UserError):
        release(tmp_path, ready, required_gates=["tokens"])
    assert not (tmp_path / "release.manifest.json").exists()


def test_a_folder_of_another_checkpoint_is_refused(tmp_path: Path, ready: dict[str, Path]) -> None:
    ready["checkpoint"] = given.checkpoint(tmp_path / "other", {"source/config.json": "{}"})
    with pytest.raises(UserError, match="folder_macos was made from another checkpoint"):
        release(tmp_path, ready)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folders": ["macos", "ios"]}, "folder ios must be both"),
        ({"artifacts": {"absent.aimodel": {}}}, r"`absent\.aimodel` is declared"),
    ],
)
def test_a_configuration_that_does_not_fit(
    tmp_path: Path, ready: dict[str, Path], changes: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        release(tmp_path, ready, **changes)


def test_one_name_with_two_contents_is_refused(tmp_path: Path, ready: dict[str, Path]) -> None:
    inputs = {"checkpoint": ready["checkpoint"], "bundle_core": given.bundle(tmp_path, "other", b"other")}
    params = given.package_params(folder="ios", bundles={"core": "tiny_core.aimodel"}, tables=[])
    ready["folder_ios"] = given.build_package(tmp_path, inputs, params)
    with pytest.raises(UserError, match=r"`tiny_core\.aimodel` is published with two contents"):
        release(tmp_path, ready, folders=["ios", "macos"])


def test_a_bundle_that_is_not_what_provenance_says_is_refused(
    tmp_path: Path, ready: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these digests gates are known to have judged what is published."""
    monkeypatch.setattr(
        "workflow_scripts.release.package.describe",
        lambda manifest: describe(manifest) | {"digest": "ab" * 32},
    )
    params = given.package_params(folder="ios", tables=[])
    inputs = given.package_inputs(tmp_path / "ios")
    del inputs["tables_0"]
    ready["folder_ios"] = given.build_package(tmp_path, inputs, params)
    with pytest.raises(
        UserError, match=r"`ios/tiny_core\.aimodel` is not the result that provenance\.json names"
    ):
        release(tmp_path, ready, folders=["ios", "macos"])


def test_a_bundle_that_no_gate_judged_under_its_name_is_refused(
    tmp_path: Path, ready: dict[str, Path]
) -> None:
    released = given.bundle(tmp_path / "judged", "core_fp16", b"core" * 50)
    ready["gate_numbers"] = given.gate(tmp_path, "numbers", inputs={"bundle": given.digest(released)})
    release(tmp_path, ready)
    ready["gate_numbers"] = given.gate(tmp_path, "numbers", inputs={"bundle": "cd" * 32})
    with pytest.raises(
        UserError, match=r"`tiny_core\.aimodel` is published with .* but `numbers` judged cdcd"
    ):
        release(tmp_path, ready)


def test_a_folder_that_needs_another_says_so(tmp_path: Path, ready: dict[str, Path], borrower: Path) -> None:
    for name in ("front", "phone"):
        ready[f"folder_{name}"] = manifest_path(borrower.parent / name)
    folder = release(tmp_path, ready, folders=["front", "macos", "phone"])
    assert Plan.open(folder / "phone").tables == ["../front/tiny_gather_raw"]
    record = json.loads((folder / "release.json").read_text())["folders"]
    made_of = json.loads((folder / "front" / "provenance.json").read_text())["tiny_gather_raw"]
    assert {name: [entry["path"] for entry in record[name]["tables"]] for name in record} == {
        "front": [],
        "macos": ["macos/tiny_gather_raw"],
        "phone": ["front/tiny_gather_raw"],
    }
    assert record["phone"]["tables"][0]["digest"] == made_of["digest"]
    assert "| `phone/` | macOS, iOS | `front/tiny_gather_raw/` |" in (folder / "README.md").read_text()


def test_files_of_an_earlier_matrix_do_not_survive(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    given.write_files(folder, {"ios/old.aimodel/main.mlirb": "old"})
    assert "ios/old.aimodel/main.mlirb" not in names(release(tmp_path, ready))


def test_the_stages_run_from_the_command_line(tmp_path: Path, inputs: dict[str, Path]) -> None:
    arguments = ["--input", *(f"{name}={path}" for name, path in inputs.items())]
    output = tmp_path / "package/macos.manifest.json"
    command = [sys.executable, "-m", "workflow_scripts", "stage", "package", *arguments]
    command += [
        "--params",
        json.dumps(given.package_params()),
        "--output",
        str(output),
        "--log",
        str(tmp_path / "log"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert Plan.open(tree_path(output)).driver == "hostcache"


def test_no_heavy_library_is_imported() -> None:
    modules = "stages.package, workflow_scripts.stages.release, workflow_scripts.release.verify"
    heavy = "{'torch', 'transformers', 'coreai', 'numpy'}"
    code = f"import sys, workflow_scripts.{modules}\nprint(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"


def test_sizes_are_shown_in_decimal_units() -> None:
    shown = [human_size(count) for count in (999, 1000, 388_000_000, 2_350_000_000)]
    assert shown == ["999 bytes", "1.00 kB", "388.00 MB", "2.35 GB"]
