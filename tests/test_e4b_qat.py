"""The second embedded model, in the shape of E4B and on a 4-bit grid, through its whole release in a clean clone."""

import json
import os
import subprocess
import sys

import pytest

from workflow_scripts.checks.clone import copy_project

pytestmark = [pytest.mark.end_to_end, pytest.mark.other_model]
NAME = "gemma-4-tiny-e4b-qat"
DECODERS = tuple(f"gemma4_tiny_e4b_qat_decode_int4qat{form}" for form in ("", "_tbl", "_tbl4", "_tbl4_ring"))


def run(folder, *command):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    store = {"GEMMA4_STORE": os.environ.get("GEMMA4_CHECK_STORE") or str(folder.parent / "store")}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment | store, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clones") / "e4b qat"
    copy_project(folder)
    built = run(folder, "snakemake", "-j2", "release", "--configfile", "config/tiny-e4b-qat.yaml")
    assert built.returncode == 0, built.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def record(clone):
    return json.loads((clone / f"results/{NAME}/release/release.json").read_text())


def test_every_required_gate_passed(record):
    required = {name: gate for name, gate in record["gates"].items() if gate["required"]}
    assert {gate["verdict"] for gate in required.values()} == {"pass"}
    for decoder in DECODERS:
        assert len(required[f"tokens_gpu-pipelined/{decoder}"]["tokens"]["france"]) == 8
    assert {"tables_gemma4_qat_gather_raw", "tables_gemma4_qat_gather_raw_int4"} <= required.keys()


def test_each_decoder_is_paired_with_the_tables_that_it_was_made_with(record):
    read = {name: record["folders"][f"gpu-pipelined/{name}"]["tables"] for name in DECODERS}
    layouts = {name: [entry["path"] for entry in tables] for name, tables in read.items()}
    packed, rows = "ios-frontend/gemma4_qat_gather_raw_int4", "ios-frontend/gemma4_qat_gather_raw"
    assert layouts == {name: [rows if name.endswith("_tbl") else packed] for name in DECODERS}
    for entry in (entry for tables in read.values() for entry in tables):
        assert entry["digest"] == record["artifacts"][entry["path"].rpartition("/")[2]]["digest"]


def test_the_report_says_what_decodes_exactly(clone):
    """Of the trained grid only the float16 rounding of a step is lost; per tensor and in total."""
    path = clone / f"results/{NAME}/weights/int4-qat-b32/report.json"
    report = json.loads(path.read_text())
    for figures in (report["total"], *report["tensors"].values()):
        assert figures["exact_share"] > 0.98 and figures["largest_deviation"] < 0.04


def test_a_decoder_over_the_packed_table_answers_from_its_folder(clone):
    folder = clone / f"results/{NAME}/release/gpu-pipelined/{DECODERS[2]}"
    asked = run(clone, "workflow_scripts", "chat", str(folder), "--prompt", "What is the capital of France?")
    assert (asked.returncode, asked.stdout) == (0, "The capital of France is Paris.\n"), asked.stderr
