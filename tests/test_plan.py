"""`plan`: its bytes are those that are built, its states those that a run finds, and it touches nothing."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, TINY
from workflow_scripts import files, manifest
from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.needed import read_json_object
from workflow_scripts.checks.clone import copy_project
from workflow_scripts.configuration.data import FORMS
from workflow_scripts.plan import jobs
from workflow_scripts.plan.seconds import Clock, Dialogues
from workflow_scripts.plan.sizes import Model
from workflow_scripts.quantize.recipes import RECIPES
from workflow_scripts.usage.record import record_path, write_record
from workflow_scripts.usage.watch import Figures
from workflow_scripts.why import Command

TARGET = f"results/gemma-4-tiny/tables/gemma4_gather_raw{manifest.SUFFIX}"
SMALL, FULL = 3_942_244, 9_303_169_419  # bytes of the checkpoints that figures.yaml is of


def model(folder):
    path = ROOT / folder / "config.json"
    return Model(parse_text_config(read_json_object(path), str(path)))


@pytest.fixture(scope="module")
def e2b():
    return model("resources/rehearsal-e2b")


# --- bytes -----------------------------------------------------------------------------------------------------------


def built(folder):
    return jobs.bytes_of(manifest.read_manifest(manifest.manifest_path(folder)))


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "int8-kmeans-g32"])
def test_weights_have_the_predicted_bytes(tiny_weights, recipe):
    assert model(TINY).weights(recipe) == pytest.approx(built(tiny_weights[recipe]), rel=0.01)


def test_tables_have_the_predicted_bytes(tiny_tables):
    assert model(TINY).tables(int4=False) == pytest.approx(built(tiny_tables), rel=0.001)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_stored_and_shipped_as_the_quantizer_counts(recipe):
    """Without the estimated text: matrices alone, by the functions that lay them out."""
    from workflow_scripts.checkpoint.safetensors import DTYPES
    from workflow_scripts.plan.sizes import _shipped, _stored
    from workflow_scripts.quantize.encode import describe, shipped_bytes
    from workflow_scripts.quantize.weights import stored_parts

    for kind, encoding in RECIPES[recipe].encodings.items():
        entry = describe(kind, (96, 256), encoding)
        parts = stored_parts("m", entry).values()
        stored = sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in parts)
        assert _stored(encoding, (96, 256)) == stored
        value = DTYPES[entry["dtype"]].itemsize if entry["kind"] == "dense" else 2
        assert _shipped(encoding, (96, 256), value) == shipped_bytes(entry)


# As built with config/rehearsal-e2b.yaml, see docs/performance.md.
@pytest.mark.parametrize(
    ("form", "compute", "recipe", "more", "size"),
    [
        ("hostcache_core", "fp32", "fp32", {}, 7_453_831_621),
        ("hostcache_metal", "fp16", "int8-kmeans-g32", {}, 1_879_709_750),
        ("hostcache_metal", "fp32", "int8-kmeans-g32", {}, 1_883_129_818),
        ("hostcache_metal", "fp16", "int4-kmeans-g32", {}, 1_392_703_879),
        ("hostcache_metal", "fp32", "int4-kmeans-g32", {}, 2_004_580_907),
        ("decode", "fp16", "int4-linear-b32", {}, 1_707_311_340),
        ("decode_tbl", "fp32", "int4-linear-b32", {}, 1_876_497_391),
        ("decode_ring", "fp16", "int4-linear-b32", {"functions": 2}, 1_707_775_299),
        ("ane_chunk", "fp32", "int8-kmeans-g32", {"layers": (13, 15)}, 81_272_468),
        ("head_argmax_metal", "fp16", "int8-kmeans-g32", {}, 406_852_772),
        ("head_argmax_metal", "fp16", "int4-kmeans-g32", {}, 201_593_932),
        ("ane_head", "fp16", "int8-kmeans-g32", {}, 406_860_364),
        ("frontend", "fp16", None, {}, 2_808_617_838),
    ],
)
def test_bundles_of_real_shapes_have_the_predicted_bytes(e2b, form, compute, recipe, more, size):
    near = 0.006 if form == "ane_chunk" else 0.0001
    assert e2b.bundle(form, compute, recipe, **more) == pytest.approx(size, rel=near)


@pytest.mark.parametrize(
    ("recipe", "size"),
    [
        ("fp32", 9_064_204_392),
        ("int8-kmeans-g32", 2_286_373_873),
        ("int4-kmeans-g32", 2_574_003_702),
        ("int4-linear-b32", 2_408_740_695),
    ],
)
def test_weights_of_real_shapes_have_the_predicted_bytes(e2b, recipe, size):
    assert e2b.weights(recipe) == pytest.approx(size, rel=0.0001)


def test_tables_on_the_grid_take_nine_of_sixteen_bits_of_int8(e2b):
    """Int8 rows have a float32 scale each; the projection is the same in both."""
    config = e2b.config
    row = config.num_hidden_layers * config.hidden_size_per_layer_input
    values = config.vocab_size * (config.hidden_size + row)
    assert e2b.tables(int4=False) - e2b.tables(int4=True) == values * 7 // 16 + 8 * config.vocab_size


# --- seconds ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path):
    return tmp_path / "results" / "model"


def command(home, stage, name, inputs=None, **params):
    log, output = home / "logs" / f"{name}.log", home / f"{name}{manifest.SUFFIX}"
    return Command(stage, inputs or {}, params, output, None, log)


def record(home, stage, name, seconds, size=100, failed=False):
    log = home / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    figures = Figures(seconds, seconds, None, None, None)
    write_record(log, stage, name.rpartition("/")[2], figures, None if failed else "a key", size)


def clock(home, size, dialogues=None, made=()):
    by_output = {one.output: one for one in made}
    return Clock(home, size, Dialogues(dialogues or {}), by_output.get)


def test_the_last_build_of_the_same_job_is_the_best_guess(home):
    record(home, "tables", "tables/raw", 12.5)
    seconds, origin = clock(home, SMALL).seconds(command(home, "tables", "tables/raw"))
    assert seconds == 12.5 and re.fullmatch(r"measured here, \d{4}-\d\d-\d\d", origin)


@pytest.mark.parametrize("damage", ["failed", "cut", "another stage"])
def test_a_record_that_says_nothing_of_the_job_is_passed_over(home, damage):
    record(
        home,
        "oracle" if damage == "another stage" else "tables",
        "tables/raw",
        12.5,
        failed=damage == "failed",
    )
    asked = command(home, "tables", "tables/raw")
    if damage == "cut":
        record_path(asked.log).write_text("{")
    assert clock(home, SMALL).seconds(asked) == (pytest.approx(2.4), "documented, by bytes")


def test_a_like_model_gives_seconds_by_bytes(home):
    other = home.with_name("other")
    record(other, "checkpoint", "checkpoint/text", 1.0, size=1000)
    record(other, "weights", "weights/a", 10.0)
    record(other, "weights", "weights/b", 20.0)
    seconds, origin = clock(home, 1500).seconds(command(home, "weights", "weights/c"))
    assert seconds == pytest.approx(22.5) and origin.startswith("measured here with other, ")
    assert clock(home, 5000).seconds(command(home, "weights", "weights/c"))[1] == "documented, by bytes"


def test_documented_seconds_go_by_bytes(home):
    seconds = [clock(home, size).seconds(command(home, "weights", "weights/c"))[0] for size in (SMALL, FULL)]
    assert seconds == pytest.approx([5.8, 28.0])
    twice = clock(home, 2 * FULL).seconds(command(home, "weights", "weights/c"))[0]
    assert twice == pytest.approx(28 + 22.2, abs=0.1)
    assert clock(home, 1).seconds(command(home, "weights", "weights/c"))[0] == 5.8
    assert clock(home, FULL).seconds(command(home, "aot", "aot/c")) == (None, "unknown")


def test_a_gate_that_feeds_dialogues_takes_its_positions_times_its_bundles(home):
    """A like model was asked other dialogues, so its seconds do not count."""
    other = home.with_name("other")
    record(other, "checkpoint", "checkpoint/text", 1.0, size=FULL)
    record(other, "gate_tokens", "gates/tokens/macos", 1.0)
    core = command(home, "export_hostcache", "bundles/core", form="hostcache_core")
    head = command(home, "export_head", "bundles/head", form="head")
    inputs = {"bundle_core": core.output, "bundle_head": head.output, "tables_0": Path("tables")}
    folder = command(home, "package", "package/macos", inputs, context=64)
    dialogues = {
        "short": {"prompt_ids": [1, 2, 3], "new_tokens": 8},  # 10 positions
        "long": {"prompt_ids": [1], "new_tokens": 400},
        "told": {"turns": ["12345678"] * 2, "new_tokens": 40},  # 2 frames of 10 and 2 tokens, 2 answers: 103
    }
    times = clock(home, FULL, dialogues, [core, head, folder])
    gates = {
        stage: times.seconds(command(home, stage, f"gates/{stage}", {"folder": folder.output}, **params))[0]
        for stage, params in (
            ("gate_tokens", {}),
            ("gate_long_run", {}),
            ("gate_chat", {"dialogues": ["short"]}),
        )
    }
    position = 16 + 45
    assert gates == {
        "gate_tokens": pytest.approx(15 + 113 * position),
        "gate_long_run": pytest.approx(15 + 64 * position),  # as far as there is room
        "gate_chat": pytest.approx(15 + 10 * position),
    }


def test_documented_seconds_are_of_stages_and_forms_that_exist():
    figures = yaml.safe_load((ROOT / "workflow_scripts/plan/figures.yaml").read_text())
    modules = {path.stem for path in (ROOT / "workflow_scripts/stages").glob("*.py")}
    assert figures["stages"].keys() <= modules
    assert (
        {form for form, kind in FORMS.items() if kind.bundle}
        <= figures["positions"].keys()
        <= {*FORMS} | modules
    )


# --- the least time --------------------------------------------------------------------------------------------------


def job(name, seconds, after=(), mem_mb=100, threads=1):
    return jobs.Job(name, "stage", jobs.BUILD, False, 1, "", 1, mem_mb, threads, seconds, "", tuple(after))


def test_the_least_time_is_that_of_chain_cores_or_memory():
    wide = [job("a", 10.0), *(job(f"b{i}", 10.0, ["a"]) for i in range(8))]
    assert jobs.least_seconds(wide, cores=8, mem_mb=10_000) == (20.0, "the longest chain of jobs")
    assert jobs.least_seconds(wide, cores=2, mem_mb=10_000) == (45.0, "2 cores")
    assert jobs.least_seconds(wide, cores=8, mem_mb=200) == (45.0, "200 MB of memory")
    assert jobs.least_seconds([replace(wide[0], threads=8), wide[1]], cores=2, mem_mb=1000)[0] == 20.0
    assert jobs.least_seconds([job("a", None), job("b", 5.0, ["a"])], cores=1, mem_mb=100)[0] == 5.0
    assert jobs.least_seconds([], cores=1, mem_mb=100)[0] == 0.0


# --- through Snakemake -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans") / "check out"
    copy_project(folder)
    return folder


def call(folder, *arguments, **environment):
    environment = os.environ | {"GEMMA4_STORE": "off", "PYTHONPATH": str(folder)} | environment
    run = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def plan(folder, *arguments, **environment):
    """The plan's JSON, and its jobs by name."""
    found = json.loads(call(folder, "workflow_scripts", "plan", "--json", *arguments, **environment))
    return found, {one["name"]: one for one in found["jobs"]}


def listing(folder):
    return {path: files.file_stamp(path) for path in files.tree_files(folder)} if folder.exists() else {}


def test_from_nothing_to_everything_built(project):
    """Cold; built; lost, but in the local store; on another host with the shared one."""
    results = project / "results"
    levels = {"GEMMA4_STORE": str(project / "store"), "GEMMA4_STORE_SHARED": f"file://{project}/shared"}
    found, planned = plan(project, TARGET, **levels)
    text, tables = planned["checkpoint/text"], planned["tables/gemma4_gather_raw"]
    assert (text["state"], tables["state"], tables["after"]) == ("build", "build", ["checkpoint/text"])
    assert (text["waits"], tables["waits"]) == (False, True)
    assert tables["seconds_from"] == "documented, by bytes" and tables["mem_mb"] == 1000
    assert not results.exists() and not (project / "store").exists()

    call(project, "snakemake", "--cores", "1", TARGET, **levels)
    sizes = {name: built(results / "gemma-4-tiny" / name) for name in planned}
    assert {name: one["size"] for name, one in planned.items()} == pytest.approx(sizes, rel=0.02)
    before = listing(results)
    found, planned = plan(project, TARGET, **levels)
    assert {one["state"] for one in planned.values()} == {"up to date"}
    assert {name: one["size"] for name, one in planned.items()} == sizes
    assert found["least_seconds"] == 0 and {one["new"] for one in planned.values()} == {0}
    assert listing(results) == before

    for kept in ("tables/gemma4_gather_raw.manifest.json", "checkpoint/text.manifest.json"):
        (results / "gemma-4-tiny" / kept).unlink()
        _, planned = plan(project, TARGET, **levels)
        assert planned["tables/gemma4_gather_raw"]["state"] == "local store"
    _, planned = plan(project, TARGET)
    assert planned["checkpoint/text"]["state"] == "build"
    assert planned["tables/gemma4_gather_raw"]["seconds_from"].startswith("measured here, ")

    shutil.rmtree(project / "store")
    _, planned = plan(project, TARGET, **levels)
    assert {one["state"] for one in planned.values()} == {"shared store"}
    assert {name: one["new"] for name, one in planned.items()} == sizes


def test_snakemake_plan_leaves_a_damaged_result_as_it_is(project):
    """A run forgets it and builds it anew; whoever asks for a plan did not ask for that."""
    call(project, "snakemake", "--cores", "1", TARGET)
    meta = project / "results/gemma-4-tiny/tables/gemma4_gather_raw/meta.json"
    whole = meta.read_text()
    meta.write_text("{}")
    before = listing(project / "results")
    call(project, "snakemake", "--dry-run", TARGET)
    assert listing(project / "results") == before
    said = call(project, "snakemake", "plan", "--cores", "2", "--resources", "mem_mb=3000")
    assert listing(project / "results") == before
    rows = {row[0]: row[1:] for line in said.splitlines() if len(row := re.split(r" {2,}", line)) > 8}
    assert rows["checkpoint"][:5] == ["1", "1", "0", "0", "0"]
    assert rows["tables"][:5] == ["1", "0", "0", "0", "1"]
    assert int(rows["all"][0]) == sum(
        int(row[0]) for name, row in rows.items() if name not in ("STAGE", "all")
    )
    assert "cores" in said and "wait for an input" in said
    call(project, "snakemake", "--cores", "1", TARGET)
    assert meta.read_text() == whole
    shutil.rmtree(project / "results")


def test_a_real_model_is_planned_from_its_config_json_alone(project):
    """Of E2B's shapes, by a model file and an own key; nothing is fetched, and torch is not needed."""
    code = (
        "import sys; from workflow_scripts.plan.command import main; main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    arguments = (
        "--configfile",
        "config/gemma-4-e2b.yaml",
        "--config",
        "checkpoint={source: tests/published/gemma-4-e2b-qat}",
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "--json", *arguments],
        cwd=project,
        env=os.environ | {"GEMMA4_STORE": "off", "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    planned = {one["name"]: one for one in found["jobs"]}
    assert planned["tables/gemma4_gather_raw"]["size"] == pytest.approx(2_808_612_157, rel=1e-6)
    assert planned["bundles/gemma4_e2b_metal_int8v3_L35.aimodel"]["size"] == pytest.approx(
        1_879_709_750, rel=1e-4
    )
    assert planned["oracle/dialogues"]["mem_mb"] == 9500
    assert all(one["seconds"] > 0 for one in planned.values()), "no stage of a release is unknown"
    # The published folders hold 16.96 GB; the phone's decoder of 1.71 GB came later.
    assert planned["release"]["size"] == pytest.approx(16.96e9 + 1.707e9, rel=0.005)
    assert planned["release"]["new"] == 0, "linked"
    assert (
        found["notes"][0].startswith("a run would stop: ")
        and "tokenizer.json is missing" in found["notes"][0]
    )
    assert not (project / "results" / "gemma-4-e2b").exists()


def test_without_a_config_json_only_the_sizes_are_unknown(project, tmp_path):
    found, planned = plan(
        project, "--configfile", "config/gemma-4-e2b.yaml", HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert planned["weights/fp32"]["size"] is None and planned["weights/fp32"]["seconds"] > 0
    assert "hf download google/gemma-4-E2B-it config.json --revision" in found["notes"][0]


def test_a_wrong_config_is_refused_in_its_words(project):
    run = subprocess.run(
        [sys.executable, "-m", "workflow_scripts", "plan", "--config", "contxt=3"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and "contxt" in run.stderr and "context" in run.stderr
    assert "Traceback" not in run.stderr and run.stdout == ""
