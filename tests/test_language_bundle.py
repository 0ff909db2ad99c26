"""Folders that hold one whole decoder: what language engines read there, and the tables that lie elsewhere."""

import json
import re
import shutil
from pathlib import Path

import pytest
import release_inputs as given

from workflow_scripts.errors import UserError
from workflow_scripts.files import canonical_json
from workflow_scripts.manifest import manifest_path, tree_path
from workflow_scripts.release import seal, verify
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import ChatTokenizer

STEM = "tiny_decode_int4lin_tbl"
NAME = f"gpu-pipelined/{STEM}"
RING = f"gpu-pipelined/{STEM}_ring"
TABLES = "tiny_gather_raw"
END = "<turn|>"


def spoken(**changes: object) -> dict[str, object]:
    return {
        "compression": {"scheme": "int4-linear-b32"},
        "functions": ["main"],
        "max_context_length": 63,
        "cache_minimum": 32,
        **changes,
    }


def params(name: str = NAME, **changes: object) -> dict[str, object]:
    return given.package_params(
        folder=name,
        driver="decode",
        bundles={"decoder": f"{name.rpartition('/')[2]}.aimodel"},
        tables=[],
        tables_in={"folder": "ios-frontend", "tables": [TABLES]},
        context=63,
        **{"language": spoken(), **changes},
    )


def front(root: Path, checkpoint: Path, tables: Path) -> Path:
    """The folder that holds the tables."""
    inputs = {"checkpoint": checkpoint, "tables_0": tables}
    wanted = given.package_params(folder="ios-frontend", bundles={}, driver=None, tokenizer=False)
    return given.build_package(root, inputs, wanted)


def decoder(root: Path, tables: str, name: str = STEM) -> Path:
    """Manifest of a decoder that was made with the tables of a digest."""
    return given.bundle(root, name, b"decoder", {"tables": tables, "weights": "2" * 64})


@pytest.fixture()
def inputs(tmp_path: Path) -> dict[str, Path]:
    """Inputs of the language bundle; the folder of the tables is built where it belongs."""
    source = given.checkpoint(tmp_path)
    tables = given.tables(tmp_path, given.digest(source))
    front(tmp_path, source, tables)
    return {
        "checkpoint": source,
        "bundle_decoder": decoder(tmp_path, given.digest(tables)),
        "beside_0": tables,
    }


def build(root: Path, inputs: dict[str, Path], **changes: object) -> Path:
    return tree_path(given.build_package(root, inputs, params(**changes)))


def edit(path: Path, change) -> None:
    """Change a JSON file and keep the order of its keys."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2))


def altered_checkpoint(root: Path, name: str, change) -> Path:
    """A checkpoint with one of its tokenizer files edited."""
    path = given.write_files(root / "altered", {name: (given.TINY / name).read_bytes()}) / name
    edit(path, change)
    return given.checkpoint(root / "other", {f"source/{name}": path.read_text()})


# --- what an engine reads -----------------------------------------------------------------------------------------


def test_the_metadata_is_what_engines_read(tmp_path: Path, inputs: dict[str, Path]) -> None:
    folder = build(tmp_path, inputs)
    assert folder == tmp_path / "package" / NAME
    assert json.loads((folder / "metadata.json").read_text()) == {
        "metadata_version": "0.2",
        "kind": "llm",
        "name": STEM,
        "assets": {"main": f"{STEM}.aimodel"},
        "language": {
            "tokenizer": given.HUB["repository"],
            "embedded_tokenizer": True,
            "vocab_size": 1024,
            "max_context_length": 63,
            "function_map": {"main": ["main"]},
            "stop_token_ids": [1, 106],
        },
        "source": {
            "model_definition": "torch",
            "hf_model_id": given.HUB["repository"],
            "hf_revision": given.HUB["commit"],
        },
        "compression": {"scheme": "int4-linear-b32"},
        "compilation": {"date": "2026-01-01T00:00:00Z", "targets": []},
    }
    assert {path.name for path in folder.iterdir()} == {
        "metadata.json",
        f"{STEM}.aimodel",
        "tokenizer",
        "gemma4_plan.json",
        "provenance.json",
    }


def test_a_local_checkpoint_gets_no_name_of_a_repository(tmp_path: Path, inputs: dict[str, Path]) -> None:
    inputs["checkpoint"] = given.checkpoint(tmp_path / "local", origin=given.LOCAL)
    metadata = json.loads((build(tmp_path, inputs) / "metadata.json").read_text())
    assert metadata["source"] == {"model_definition": "torch"}
    assert metadata["language"]["tokenizer"] == "tokenizer" and metadata["language"]["embedded_tokenizer"]


def test_the_date_is_that_of_the_bundles(tmp_path: Path, inputs: dict[str, Path]) -> None:
    from workflow_scripts.coreai.private import _CREATED

    date = json.loads((build(tmp_path, inputs) / "metadata.json").read_text())["compilation"]["date"]
    assert date.replace("-", "").replace(":", "") == _CREATED


def test_only_the_token_that_ends_an_answer_is_another(tmp_path: Path, inputs: dict[str, Path]) -> None:
    folder, source = build(tmp_path, inputs), tree_path(inputs["checkpoint"]) / "source"
    for name in given.TOKENIZER_FILES:
        if name != "tokenizer_config.json":
            assert (folder / "tokenizer" / name).read_bytes() == (source / name).read_bytes()
    before, after = (
        json.loads((tree / "tokenizer_config.json").read_text()) for tree in (source, folder / "tokenizer")
    )
    assert (before["eos_token"], after["eos_token"]) == ("<eos>", END)
    assert list({**before, "eos_token": END}.items()) == list(after.items())
    assert ChatTokenizer.open(folder / "tokenizer").stop_token_ids == (1, 106)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"content": "<eos>", "lstrip": True}, {"content": END, "lstrip": True}),
        (END, END),
        (None, END),
    ],
)
def test_the_end_token_in_every_spelling(tmp_path: Path, inputs: dict[str, Path], end, expected) -> None:
    inputs["checkpoint"] = altered_checkpoint(
        tmp_path, "tokenizer_config.json", lambda config: config.update(eos_token=end, note="ünïcode")
    )
    path = build(tmp_path, inputs) / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    assert (config["eos_token"], config["note"]) == (expected, "ünïcode")
    if end == expected:
        source = tree_path(inputs["checkpoint"]) / "source" / "tokenizer_config.json"
        assert path.read_bytes() == source.read_bytes()


def test_a_tokenizer_without_the_end_of_a_turn_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    def rename(tokenizer: dict) -> None:
        for entry in tokenizer["added_tokens"]:
            entry["content"] = entry["content"].replace(END, "<end>")
        tokenizer["model"]["vocab"] = {
            token.replace(END, "<end>"): number for token, number in tokenizer["model"]["vocab"].items()
        }

    inputs["checkpoint"] = altered_checkpoint(tmp_path, "tokenizer.json", rename)
    with pytest.raises(UserError, match=r"has no token <turn\|>"):
        build(tmp_path, inputs)


@pytest.mark.parametrize("changes", [{"language": None}, {"driver": "hostcache"}])
def test_driver_and_language_go_together(tmp_path: Path, inputs: dict[str, Path], changes: dict) -> None:
    with pytest.raises(UserError, match="`language` goes with the driver decode"):
        given.build_package(tmp_path, inputs, {**params(), **changes})


# --- the tables elsewhere -----------------------------------------------------------------------------------------


def test_the_plan_leads_out_of_both_folders(tmp_path: Path, inputs: dict[str, Path]) -> None:
    folder = build(tmp_path, inputs)
    plan = Plan.open(folder)
    assert plan.tables == [f"../../ios-frontend/{TABLES}"]
    assert (plan.driver, plan.context, plan.cache_minimum) == ("decode", 63, 32)
    assert (folder / plan.tables[0] / "ple.i8").is_file()
    assert plan.tables_elsewhere(folder) == {(tmp_path / "package" / "ios-frontend").resolve()}


def test_a_bundle_alone_says_where_its_tables_belong(tmp_path: Path, inputs: dict[str, Path]) -> None:
    alone = Path(shutil.copytree(build(tmp_path, inputs), tmp_path / "away" / NAME))
    beside = alone.parent.resolve()
    with pytest.raises(
        UserError, match=f"folder `ios-frontend` of the same release; put that folder beside {beside}$"
    ):
        Plan.open(alone)
    shutil.copytree(tmp_path / "package" / "ios-frontend", beside.parent / "ios-frontend")
    assert Plan.open(alone).tables == [f"../../ios-frontend/{TABLES}"]


@pytest.mark.parametrize(("made_from", "message"), [("cd" * 32, "was made from another checkpoint")])
def test_tables_that_say_another_checkpoint_are_not_packaged(
    tmp_path: Path, inputs: dict[str, Path], made_from: str, message: str
) -> None:
    source = inputs["checkpoint"]
    with pytest.raises(UserError, match=f"gather_raw {message} .*says cdcdcd.*expected ababab"):
        front(tmp_path, source, given.tables(tmp_path, given.digest(source), made_from))


def test_tables_that_do_not_say_their_checkpoint_are_not_packaged(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    old = given.result(
        tmp_path,
        "tables",
        "gather_raw",
        {"meta.json": "{}"},
        {"checkpoint": given.digest(inputs["checkpoint"])},
    )
    with pytest.raises(UserError, match="does not say which checkpoint the tables were made from"):
        front(tmp_path, inputs["checkpoint"], old)


# --- in a release -------------------------------------------------------------------------------------------------


@pytest.fixture()
def ready(tmp_path: Path, inputs: dict[str, Path]) -> dict[str, Path]:
    """Inputs of a release with two language bundles."""
    ring = {"functions": ["decode_24", "decode_63"], "cache_minimum": None}
    made_with = given.digest(tmp_path / "tables" / "gather_raw.manifest.json")
    other = inputs | {"bundle_decoder": decoder(tmp_path, made_with, f"{STEM}_ring")}
    return {
        "checkpoint": inputs["checkpoint"],
        "folder_ios-frontend": manifest_path(tmp_path / "package" / "ios-frontend"),
        f"folder_{NAME}": manifest_path(build(tmp_path, inputs)),
        f"folder_{RING}": manifest_path(build(tmp_path, other, name=RING, language=spoken(**ring))),
        f"gate_tokens_{NAME}": given.gate(tmp_path, "tokens"),
        f"gate_tokens_{RING}": given.gate(tmp_path, "tokens_ring"),
    }


def release(root: Path, inputs: dict[str, Path]) -> Path:
    wanted = given.release_params(
        folders=[name.removeprefix("folder_") for name in inputs if name.startswith("folder_")],
        required_gates=[f"tokens_{NAME}", f"tokens_{RING}"],
        artifacts={f"{STEM}.aimodel": {"form": "decode_tbl", "recipe": "int4-linear-b32", "compute": "fp16"}},
    )
    return given.build_release(root, inputs, wanted)


def test_a_release_with_folders_in_a_folder_is_whole(tmp_path: Path, ready: dict[str, Path]) -> None:
    folder = release(tmp_path, ready)
    assert verify.verify(folder).problems == {}
    assert Plan.open(folder / NAME).tables == [f"../../ios-frontend/{TABLES}"]
    record = seal.open_sealed((folder / "release.json").read_bytes())
    assert record["gates"].keys() == {f"tokens_{NAME}", f"tokens_{RING}"}
    assert record["artifacts"][f"{STEM}.aimodel"]["folders"] == [NAME]
    assert record["artifacts"][f"{STEM}.aimodel"]["bytes"] > 0
    sizes = {name: entry["files"] for name, entry in record["folders"].items()}
    # Two of the bundle, four of the tokenizer, plan, provenance, metadata: one name begins as the other does.
    assert sizes == {"ios-frontend": 3, NAME: 9, RING: 9}
    (folder / NAME / "metadata.json").write_text("{}")
    assert list(verify.verify(folder).problems) == [f"{NAME}/metadata.json"]


def test_the_record_pairs_each_folder_with_its_tables(tmp_path: Path, ready: dict[str, Path]) -> None:
    record = seal.open_sealed((release(tmp_path, ready) / "release.json").read_bytes())
    digest = given.digest(tmp_path / "tables" / "gather_raw.manifest.json")
    read = [{"path": f"ios-frontend/{TABLES}", "digest": digest}]
    tables = {name: entry["tables"] for name, entry in record["folders"].items()}
    assert tables == {"ios-frontend": [], NAME: read, RING: read}


def test_the_readme_names_each_language_bundle(tmp_path: Path, ready: dict[str, Path]) -> None:
    text = (release(tmp_path, ready) / "README.md").read_text()
    for name in (NAME, RING):
        assert re.search(rf"^\| `{name}/` \|.*\| `ios-frontend/{TABLES}/` \|", text, re.MULTILINE)
        assert f'python -m workflow_scripts chat RELEASE/{name} --prompt "' in text
        assert f"| `tokens_{name}` |" in text
    prose = re.sub(r"```.*?```", "```", text, flags=re.DOTALL)
    assert "is a language bundle" in prose and "\n\n\n" not in prose


def test_a_release_without_the_tables_is_refused(tmp_path: Path, ready: dict[str, Path]) -> None:
    del ready["folder_ios-frontend"]
    with pytest.raises(UserError, match=f"folder `{NAME}` reads the tables ios-frontend/{TABLES}, which the"):
        release(tmp_path, ready)


def test_a_decoder_that_was_made_with_other_tables_is_refused(
    tmp_path: Path, inputs: dict[str, Path], ready: dict[str, Path]
) -> None:
    """Of the same checkpoint, such as those in another layout: the embedding in its graph is theirs."""
    inputs["bundle_decoder"] = decoder(tmp_path, "3" * 64)
    ready[f"folder_{NAME}"] = manifest_path(build(tmp_path, inputs))
    with pytest.raises(UserError, match=rf"{STEM}\.aimodel` was made with other tables \(digest 333333"):
        release(tmp_path, ready)


def test_other_tables_make_a_new_folder_though_the_decoder_keeps_its_bytes(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    """The store serves a folder by its inputs' digests: without the tables it would serve one that names old tables."""
    from workflow_scripts.manifest import read_manifest

    before = build(tmp_path, inputs)
    known = read_manifest(manifest_path(before)).ingredients
    inputs["beside_0"] = given.tables(tmp_path, "0" * 64, made_from="ef" * 32)
    inputs["bundle_decoder"] = decoder(tmp_path, given.digest(inputs["beside_0"]))
    after = read_manifest(manifest_path(build(tmp_path, inputs))).ingredients
    assert after.inputs["bundle_decoder"] == known.inputs["bundle_decoder"]
    assert after.key != known.key
    provenance = json.loads((before / "provenance.json").read_text())
    assert provenance[f"{STEM}.aimodel"]["inputs"]["tables"] == given.digest(inputs["beside_0"])


def test_tables_of_another_checkpoint_are_not_released(tmp_path: Path, ready: dict[str, Path]) -> None:
    from workflow_scripts.manifest import read_manifest, write_manifest

    path = ready["folder_ios-frontend"]
    ingredients = read_manifest(path).ingredients
    given.write_files(tree_path(path) / TABLES, {"meta.json": canonical_json({"checkpoint": "cd" * 32})})
    write_manifest(tree_path(path), ingredients)
    with pytest.raises(UserError, match=f"{TABLES} was made from another checkpoint"):
        release(tmp_path, ready)
