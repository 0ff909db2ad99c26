"""The rules keep to what Snakemake does well, read from their text; and a failed job is a failed job in every mode."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from workflow_scripts import closure, manifest

FILES = [ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk"))]
TEXTS = {
    name: body
    for path in FILES
    for name, body in re.findall(
        r"^rule (\w+):\n((?:    .*\n|\n)*)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
}
STAGES = sorted(path.stem for path in (closure.PACKAGE / "stages").glob("*.py") if path.stem != "__init__")


def directives(rule):
    """Directive -> its text."""
    return dict(re.findall(r"^    (\w+):\n((?:        .*\n|\n)+)", TEXTS[rule], re.MULTILINE))


def test_all_rules_are_read():
    written = re.findall(r"^rule ", "".join(path.read_text(encoding="utf-8") for path in FILES), re.MULTILINE)
    assert len(TEXTS) == len(written) >= 25
    assert directives("weights").keys() >= {"input", "output", "log", "benchmark", "params", "shell"}


REPORT = {"report", "report_pages"}  # files for people, of this host: no results of a stage


@pytest.mark.parametrize("rule", sorted(TEXTS.keys() - REPORT))
def test_a_rule_makes_one_manifest_and_leaves_caching_to_the_store(rule):
    """Snakemake's own cache refuses rules with benchmarks, and with several outputs without names; and it deletes
    outputs of a failed job, of which a manifest is the only one here that may go."""
    found = directives(rule)
    assert not {"cache", "shadow", "retries", "group"} & found.keys()
    outputs = found.get("output", "").strip()
    assert not outputs or re.fullmatch(r"result\([^()]*\),", outputs), outputs
    assert not re.search(r"\b(temp|touch|directory|protected|pipe|ancient|ensure)\(", TEXTS[rule])


def test_one_rule_reads_what_was_published():
    """Jobs side by side that fetch one file into one cache get in each other's way: so one job fetches, once."""
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert {rule for rule in TEXTS if "checkpoint_source" in TEXTS[rule]} == {"checkpoint"}
    assert len(re.findall(r"\bcheckpoint_source\b", text)) == 2  # where it is defined and there
    fetching = {stage for stage in STAGES if "checkpoint/fetch.py" in _sources(stage)}
    assert fetching == {"checkpoint"}


def _sources(stage):
    return {path.relative_to(closure.PACKAGE).as_posix() for path in closure.stage_sources(stage)}


SNAKEFILE = """
rule release:
    input: "gates/tables/t.manifest.json"
    output: "release.json"
    shell: "cp {{input}} {{output}}"
rule gate:
    input: tables={tables!r}, checkpoint={checkpoint!r}
    output: "gates/tables/t.manifest.json"
    shell:
        "python -m workflow_scripts stage gate_tables --input tables={{input.tables:q}} "
        "checkpoint={{input.checkpoint:q}} --output {{output}} --log gate.log"
"""


def test_what_a_failed_gate_leaves_never_counts_as_made(tiny_tables, tiny_checkpoint, tmp_path):
    """Its table stays to be read, also with --keep-incomplete, which keeps outputs; every run judges anew."""
    tables = shutil.copytree(tiny_tables, tmp_path / "tables" / "t")
    np.memmap(tables / "embed_per_layer.i8", np.int8, "r+")[:] = 0
    made = manifest.read_manifest(manifest.manifest_path(tiny_tables)).ingredients
    manifest.write_manifest(tables, made)
    inputs = {"tables": tables, "checkpoint": tiny_checkpoint}
    paths = {name: str(manifest.manifest_path(tree)) for name, tree in inputs.items()}
    (tmp_path / "Snakefile").write_text(SNAKEFILE.format(**paths))
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "release", "--keep-incomplete"]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # noqa: PTH120
    for _ in range(2):
        run = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PATH": path}
        )
        assert run.returncode == 1, run.stderr
        assert "gate tables failed on t: embed_tokens_per_layer.weight: error beyond" in run.stderr
        assert not (tmp_path / "release.json").exists()
        assert sorted(p.name for p in (tmp_path / "gates/tables").iterdir() if p.name[0] != ".") == ["t"]
        assert json.loads((tmp_path / "gates/tables/t/verdict.json").read_text())["verdict"] == "fail"
