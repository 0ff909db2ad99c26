"""The profiles for clusters are what executors take and rebuild as the default one does; jobs say what they need."""

import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest
import yaml

from tests.conftest import ROOT
from tests.test_environment import PINS, requirements_of
from tests.test_rules import TEXTS, directives
from workflow_scripts.checks.clone import copy_project
from workflow_scripts.doctor import read_pins

CLUSTERS = ("slurm", "kubernetes")
LOCAL = {"checkpoint", "publish", "report", "report_pages", "plan"} | {
    *("release", "aot", "gates", "bundles", "coreml_reference")  # targets
}
SAME = ("rerun-triggers", "max-checksum-file-size", "rerun-incomplete", "nolock", "keep-going", "scheduler")
CLUSTER_PINS = read_pins(ROOT / "envs/cluster.txt")
with_executor = pytest.mark.skipif(
    not find_spec("snakemake_executor_plugin_slurm"), reason="envs/cluster.txt is not installed"
)


def profile(name):
    text = (ROOT / "profiles" / name / "config.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\?f\".*\"", "expression", text))


def local_rules():
    text = (ROOT / "Snakefile").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^localrules:\n((?:    \w+,\n)+)", text, re.M)
    return set(re.findall(r"\w+", listed))


def resources(rule):
    return dict(re.findall(r"^ {8}(\w+)=(.+?),(?:  #.*)?$", directives(rule).get("resources", ""), re.M))


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_rebuilds_what_one_host_does(name):
    """A profile takes the place of the default one, so what decides about a rerun is said again."""
    default, own = profile("default"), profile(name)
    assert {key: own.get(key) for key in SAME} == {key: default[key] for key in SAME}
    assert own["executor"] == name
    assert "cores" not in own and "resources" not in own  # those of the host that submits mean nothing


@pytest.mark.parametrize("rule", sorted(TEXTS.keys() - LOCAL))
def test_a_job_on_a_node_says_what_it_needs(rule):
    assert {"mem_mb", "runtime", "disk_mb"} <= resources(rule).keys()


def test_what_stays_on_the_submitting_host():
    """Targets, and what needs the internet or somebody's token."""
    assert local_rules() == LOCAL


def test_what_needs_a_mac_says_so():
    assert {rule for rule in TEXTS if "macos" in resources(rule)} == {
        "compile_ahead",
        "gate_gpu",
        "gate_coreml_prediction",
    }
    assert "metal_gpu=1" in profile("default")["resources"] and resources("gate_gpu")["metal_gpu"] == "1"
    # Slurm's and Kubernetes' executors take this name for a card that the cluster counts, and ask for one.
    assert not [rule for rule in TEXTS if {"gpu", "gres", "nvidia_gpu"} & resources(rule).keys()]


@pytest.mark.parametrize("name", CLUSTERS)
def test_threads_are_set_for_the_rules_that_would_take_all_cores(name):
    taking = {rule for rule in TEXTS if "threads: quantizer_threads" in TEXTS[rule]}
    assert {entry.partition("=")[0] for entry in profile(name)["set-threads"]} == taking


def test_pins_of_the_executors_agree_with_the_others():
    both = CLUSTER_PINS.keys() & PINS.keys()
    assert {name: CLUSTER_PINS[name] for name in both} == {name: PINS[name] for name in both}


@with_executor
def test_pins_of_the_executors_are_whole_and_minimal():
    plugins = [name for name in CLUSTER_PINS if name.startswith("snakemake-")]
    needed = requirements_of(plugins)
    assert needed - CLUSTER_PINS.keys() <= PINS.keys() | {"pip"}
    assert CLUSTER_PINS.keys() <= needed
    assert {name: metadata.version(name) for name in CLUSTER_PINS} == CLUSTER_PINS


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkouts") / "a checkout"
    copy_project(folder)
    return folder


def plan(checkout, *arguments):
    command = [sys.executable, "-m", "snakemake", "-n", "release", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def jobs(run):
    assert run.returncode == 0, run.stderr[-3000:]
    (total,) = set(re.findall(r"^total +(\d+)$", run.stdout + run.stderr, re.M))
    return int(total)


@with_executor
def test_snakemake_takes_the_profile_for_slurm(checkout):
    run = plan(checkout, "--workflow-profile", "profiles/slurm")
    assert "Using workflow specific profile profiles/slurm for" in run.stderr  # and no other
    assert jobs(run) == jobs(plan(checkout)) > 100


@with_executor
def test_snakemake_takes_the_profile_for_kubernetes(checkout, tmp_path):
    """With folders of this host in the place of the volume: the sources lie on it, and results are planned onto it."""
    tracked, work = tmp_path / "tracked", tmp_path / "work"
    shutil.copytree(checkout, tracked, ignore=shutil.ignore_patterns(".snakemake"))
    places = ["--default-storage-prefix", tracked, "--local-storage-prefix", work]
    run = plan(checkout, "--workflow-profile", "profiles/kubernetes", *map(str, places))
    assert jobs(run) == jobs(plan(checkout))
    assert f"{tracked}/results/gemma-4-tiny/release.manifest.json (in storage)" in run.stdout + run.stderr


@with_executor
def test_a_key_that_no_executor_knows_is_refused(checkout, tmp_path):
    shutil.copytree(ROOT / "profiles/slurm", tmp_path / "slurm")
    with (tmp_path / "slurm/config.yaml").open("a", encoding="utf-8") as file:
        file.write("slurm-no-such-setting: true\n")
    assert plan(checkout, "--workflow-profile", str(tmp_path / "slurm")).returncode != 0
