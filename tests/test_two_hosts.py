"""Two clones of the project on two hosts with one bucket: nothing is built twice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import s3_inputs
from tests.s3_inputs import BUCKET
from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.config import DEFAULT

pytestmark = pytest.mark.end_to_end
# Two bundles that are quickly made, one of them of the tables.
KEPT = ("gather_raw", "head_fp16", "frontend_int8")
DECLARED = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
SMALL = {
    "folders": {name: None for name in DECLARED["folders"] if name != "ios-frontend"},
    "gates": {"required": [], "reported": [], "evidence": []},
    "artifacts": {name: None for name in DECLARED["artifacts"] if name not in KEPT},
}
HEAD, LAST = "bundles/gemma4_tiny_fp16_head.aimodel", "bundles/gemma4_tiny_frontend_int8.aimodel"
TABLES = "tables/gemma4_gather_raw"


@pytest.fixture(scope="module")
def server():
    with s3_inputs.serve() as running:
        yield running


def test_a_second_host_takes_what_the_first_has_built_and_builds_the_rest(tmp_path, server):
    clones, own = {}, {}
    for name in ("a", "b"):
        clones[name] = tmp_path / name / "clone"
        copy_project(clones[name])
        (clones[name] / "small.yaml").write_text(yaml.safe_dump(SMALL))
        own[name] = server.environment() | {
            "GEMMA4_STORE": str(tmp_path / name / "store"),
            "GEMMA4_STORE_SHARED": f"s3://{BUCKET}/store",
        }
    options = ["--configfile", "small.yaml"]
    wanted = [f"results/gemma-4-tiny/{name}.manifest.json" for name in (HEAD, TABLES)]
    first = build(clones["a"], "-j2", *wanted, *options, environment=own["a"])
    both = {"checkpoint/text", "weights/fp16", TABLES, HEAD}
    assert {*re.findall(r"^  (\S+): built: ", first, re.M)} == {Path(name).name for name in both}

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own["b"]
    why = [sys.executable, "-m", "workflow_scripts", "why", "bundles", *options]
    asked = subprocess.run(why, cwd=clones["b"], env=environment, capture_output=True, text=True, check=True)
    states = dict(re.split(r" {2,}", row)[:2] for row in asked.stdout.splitlines()[1:6])
    assert states == dict.fromkeys(both, "from the store") | {LAST: "rebuild"}

    second = build(clones["b"], "-j2", "bundles", *options, environment=own["b"])
    told = dict(re.findall(r"^  (\S+): (built|from the store): ", second, re.M))
    taken = dict.fromkeys((Path(name).name for name in both), "from the store")
    assert told == taken | {Path(LAST).name: "built"}
    for name in wanted:
        assert (clones["a"] / name).read_bytes() == (clones["b"] / name).read_bytes()
