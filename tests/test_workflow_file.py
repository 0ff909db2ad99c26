"""The example of CI names targets, commands and settings that this project has: nobody runs it here."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from workflow_scripts.__main__ import _USAGE

FILE = ROOT / ".github/workflows/release.yml"
WORKFLOW = yaml.load(FILE.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # `on` stays a word
JOBS = WORKFLOW["jobs"]
COMMANDS = [
    shlex.split(line)
    for job in JOBS.values()
    for step in job["steps"]
    for line in step.get("run", "").splitlines()
]


def words_after(*beginning):
    """The rest of each command that begins so, and at least one."""
    found = [words[len(beginning) :] for words in COMMANDS if tuple(words[: len(beginning)]) == beginning]
    assert found
    return found


def test_the_targets_of_make_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target, *variables in words_after("make"):
        assert re.search(rf"^{target}:", makefile, re.M), target
        assert all(re.search(rf"^{word.partition('=')[0]} \?=", makefile, re.M) for word in variables)


def test_the_targets_of_snakemake_are_there():
    files = [ROOT / "Snakefile", *(ROOT / "rules").glob("*.smk")]
    rules = {name for path in files for name in re.findall(r"^rule (\w+):", path.read_text(), re.M)}
    for words in words_after(".venv/bin/python", "-m", "snakemake"):
        assert set(words[words.index("--") + 1 :]) <= rules


def test_the_commands_are_there():
    for command, *_ in words_after(".venv/bin/python", "-m", "workflow_scripts"):
        assert re.search(rf"^  {command} ", _USAGE, re.M), command


@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if "needs" in job])
def test_a_job_unpacks_what_the_one_before_it_has_packed(job):

    def step(name, action):
        (found,) = [
            x["with"] for x in JOBS[name]["steps"] if x.get("uses", "").startswith(f"actions/{action}@")
        ]
        return found

    packed = step(JOBS[job]["needs"], "upload-artifact")
    assert step(job, "download-artifact")["name"] == packed["name"]
    archives = {words[2] for words in COMMANDS if words[:2] == ["tar", "-czf"]}
    unpacked = {
        Path(x["run"].split()[-1]) for x in JOBS[job]["steps"] if x.get("run", "").startswith("tar -xzf")
    }
    assert packed["path"] in archives and unpacked == {Path(packed["path"])}


def test_what_the_settings_name_is_read():
    sources = [*(ROOT / "workflow_scripts").rglob("*.py"), *(ROOT / "tests").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources if path != Path(__file__))
    for name in WORKFLOW["env"]:
        assert name in ("CONFIG", "PYTHON_VERSION") or name in text
    assert (ROOT / WORKFLOW["on"]["workflow_dispatch"]["inputs"]["config"]["default"]).is_file()
    for job in JOBS.values():
        for step in job["steps"]:
            assert (ROOT / step.get("with", {}).get("cache-dependency-path", "README.md")).is_file()
