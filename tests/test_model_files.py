"""The shipped model files: each loads, states its model's shape, and plans a whole release from a config.json alone.

`published/<model>/config.json` are the decoder's part of the published ones, as public copies of their keys give them;
those of the vision and audio towers, which nothing here reads, are left out.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.needed import local_inputs, planned_inputs
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.checks.clone import copy_project
from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError

PUBLISHED = ROOT / "tests" / "published"
MODELS = sorted(
    path.stem for path in (ROOT / "config").glob("*.yaml") if path.stem not in ("config", "schema")
)
QAT = [name for name in MODELS if name.endswith("-qat")]
EMBEDDED = ROOT / "resources" / "gemma-4-tiny-e4b-qat"


def model(name):
    return read_config([ROOT / "config" / f"{name}.yaml"])


def text_config(name):
    """The decoder that a model file is for."""
    folder = EMBEDDED if name.startswith("tiny") else PUBLISHED / name
    return parse_text_config(json.loads((folder / "config.json").read_text()), name)


# --- the files -------------------------------------------------------------------------------------------------------


def test_every_model_that_is_promised_has_a_file():
    assert {"gemma-4-e2b", "gemma-4-e2b-qat", "gemma-4-e4b-qat", "tiny-e4b-qat"} <= {*MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_loads_and_says_how_it_is_used(name):
    config = model(name)
    assert f"make release CONFIG=config/{name}.yaml" in (ROOT / f"config/{name}.yaml").read_text()
    assert config.model in (name, f"gemma-4-{name}")
    assert config.slug == config.model.replace("-", "_").replace("gemma_4", "gemma4")
    assert any(folder.decoder for folder in config.folders.values())


@pytest.mark.parametrize("name", QAT)
def test_a_file_is_for_the_checkpoints_layers(name):
    config, text = model(name), text_config(name)
    assert config.num_hidden_layers == text.num_hidden_layers
    if "ios-ane" in config.folders:
        chunks = [config.artifacts[key].layers for key in config.folders["ios-ane"].chunks]
        producers = {text.slots(kind)[-1] for kind in (SLIDING, FULL)}
        assert sum(producers <= {*range(*layers)} for layers in chunks) == 1, "both producers in one chunk"
        first, last = config.artifacts["chunk_producers_fp32"].layers
        assert {*range(first, last)} == producers
        first, last = config.artifacts["chunk_readers_fp32"].layers
        assert (first, last) == (text.num_hidden_layers - 2, text.num_hidden_layers)
        assert first >= text.first_shared_layer and {*text.layer_types[first:]} == {SLIDING, FULL}


@pytest.mark.parametrize("name", QAT)
def test_4_bit_bundles_of_a_qat_model_keep_its_grid(name):
    shipped = model(name).shipped().values()
    assert {a.recipe for a in shipped} == {"int8-kmeans-g32", "int4-qat-b32", None}
    decoders = {
        a.published.partition("_decode_")[2]: a for a in shipped if a.tables and "macos" in a.platforms
    }
    assert {stem: (a.form, a.tables) for stem, a in decoders.items()} == {
        "int4qat.aimodel": ("decode", "gather_raw_int4"),
        "int4qat_tbl.aimodel": ("decode_tbl", "gather_raw"),
        "int4qat_tbl4.aimodel": ("decode_tbl", "gather_raw_int4"),
        "int4qat_tbl4_ring.aimodel": ("decode_ring", "gather_raw_int4"),
    }
    assert {a.recipe for a in decoders.values()} == {"int4-qat-b32"}


@pytest.mark.parametrize("name", ["gemma-4-e2b-qat", "gemma-4-e4b-qat"])
def test_phones_get_the_ring_or_few_columns(name):
    decoders = [a for a in model(name).shipped().values() if a.tables]
    phones = {(a.form, a.context) for a in decoders if "ios" in a.platforms}
    small = {("decode_tbl", 1024)} if name == "gemma-4-e2b-qat" else set()
    assert phones == {("decode_ring", 4096)} | small
    macs = {(a.context, a.cache_minimum) for a in decoders if a.platforms == ("macos",)}
    assert macs == {(4096, 2048)}
    assert {a.capacities for a in decoders if a.form == "decode_ring"} == {(1024, 4096)}


@pytest.mark.parametrize("name", QAT)
def test_no_two_models_share_a_published_table(name):
    """Apps keep what they download by its name, so another model's tables would be taken for these."""
    tables = {a.published for a in model(name).artifacts.values() if not a.is_bundle}
    base = {a.published for a in model("gemma-4-e2b").artifacts.values() if not a.is_bundle}
    assert not tables & base
    prefix = "gemma4_e4b_qat_gather_raw" if name == "gemma-4-e4b-qat" else "gemma4_qat_gather_raw"
    assert tables == {prefix, f"{prefix}_int4"}


# --- the files of a checkpoint, where some are missing ---------------------------------------------------------------


def test_a_plan_with_all_files_is_the_run():
    assert planned_inputs(EMBEDDED) == (local_inputs(EMBEDDED), None)


@pytest.mark.parametrize("name", ["gemma-4-e2b-qat", "gemma-4-e4b-qat"])
def test_a_plan_needs_config_json_alone(name):
    folder = PUBLISHED / name
    inputs, missing = planned_inputs(folder)
    assert inputs == {"source/config.json": folder / "config.json"}
    with pytest.raises(UserError) as refused:
        local_inputs(folder)
    assert missing == str(refused.value) and "tokenizer.json is missing" in missing


def test_a_plan_takes_what_is_there(tmp_path):
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "notes.txt"):
        shutil.copy(PUBLISHED / "gemma-4-e2b-qat/config.json", tmp_path / name)
    (tmp_path / "chat_template.jinja").symlink_to("nowhere")
    (tmp_path / "README").mkdir()
    inputs, missing = planned_inputs(tmp_path)
    assert {path.name for path in inputs.values()} == {
        *("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"),
    }
    assert "chat_template.jinja is a symlink" in missing


def test_no_plan_without_a_readable_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json is missing"):
        planned_inputs(tmp_path)
    (tmp_path / "config.json").write_text("<html>")
    with pytest.raises(UserError, match=r"config\.json is not readable JSON"):
        planned_inputs(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        planned_inputs(tmp_path / "nowhere")


# --- through Snakemake -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clones") / "model files"
    copy_project(folder)
    return folder


def release(folder, name, *arguments):
    """Ask for a model's release with the checkpoint in a folder that holds its config.json alone."""
    # sha256 merges: the file's pins stay, which a plan does not look at.
    source = [] if name.startswith("tiny") else ["--config", f"checkpoint={{source: tests/published/{name}}}"]
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "release",
        *arguments,
        "--configfile",
        f"config/{name}.yaml",
    ]
    return subprocess.run([*command, *source], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.end_to_end
@pytest.mark.parametrize("name", QAT)
def test_a_release_is_planned_from_a_config_json_alone(clone, name):
    config, planned = model(name), release(clone, name, "-n")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", planned.stdout, flags=re.MULTILINE))
    assert jobs["assemble_release"] == "1" and jobs["package"] == str(len(config.folders))
    assert jobs["tables"] == jobs["gate_tables"] == "2"
    assert jobs["gate_structure"] == str(sum(a.is_bundle for a in config.judged().values()))
    for artifact in config.judged().values():
        assert f"{artifact.published}.manifest.json" in planned.stdout
    said = planned.stderr + planned.stdout
    assert ("tokenizer.json is missing" in said) is not name.startswith("tiny")


@pytest.mark.end_to_end
def test_a_run_without_weights_stops_before_any_job(clone):
    run = release(clone, "gemma-4-e2b-qat", "-j1")
    assert run.returncode != 0
    assert "tests/published/gemma-4-e2b-qat/tokenizer.json is missing" in run.stderr
    assert not Path(clone, "results/gemma-4-e2b-qat/logs").exists()
