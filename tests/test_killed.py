"""A run that is killed anywhere ends, with a plain rerun, in the usual release; siblings of a failed job survive."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.config import DEFAULT

pytestmark = pytest.mark.end_to_end
ROUNDS, KILLS = 3, 4  # twelve kills; the runs of a round go on where the killed one before stopped
DECLARED = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
# The tables' release: few jobs of the same runner as all others, so that so many runs cost a minute.
SMALL = {
    "folders": {name: None for name in DECLARED["folders"] if name != "ios-frontend"},
    "gates": {"required": [], "reported": [], "evidence": []},
    "artifacts": {"head_fp16": None},
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "project"
    copy_project(folder)
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return folder


@pytest.fixture(scope="module")
def usual(project):
    """The release's bytes, and how long an undisturbed run takes."""
    start = time.monotonic()
    release(project)
    seconds = time.monotonic() - start
    return sums(project), seconds


def release(project, *flags, store="off"):
    return build(
        project, "-j8", "release", "--configfile", "small.yaml", *flags, environment={"GEMMA4_STORE": store}
    )


def sums(project):
    return (project / "results/gemma-4-tiny/release/SHA256SUMS").read_bytes()


def start(project, store):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "GEMMA4_STORE": store
    }
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", "-j8", "release", "--configfile", "small.yaml"],
        cwd=project,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_plain_rerun_after_kills_gives_the_usual_release(project, usual, tmp_path, number):
    """SIGKILL of Snakemake alone leaves orphans at work; of the whole group, half-done jobs; SIGINT is Ctrl-C."""
    expected, seconds = usual
    chance = random.Random(number)
    store = str(tmp_path / "store") if number % 2 else "off"
    shutil.rmtree(project / "results")
    for kill in range(number * KILLS, (number + 1) * KILLS):
        run = start(project, store)
        time.sleep(chance.uniform(0, seconds))
        how = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)[kill % 3]
        if run.poll() is None and kill % 4 == 0:
            run.send_signal(how)  # its children go on
        elif run.poll() is None:
            os.killpg(run.pid, how)
        run.wait()
    release(project, store=store)
    assert sums(project) == expected
    leftovers = [path for path in (project / "results").rglob(".tmp-*/**/*") if path.is_file()]
    assert not leftovers


def test_a_failing_sibling_takes_nothing_with_it(project, usual):
    """One job fails at once under -j8 --keep-going: what the others built stays and is not built again."""
    expected, _ = usual
    shutil.rmtree(project / "results")
    source = project / "workflow_scripts/stages/package.py"
    text = source.read_text()
    source.write_text(text + '\n\ndef run(job):\n    raise RuntimeError("a planted fault")\n')
    try:
        run = start(project, "off")
        assert run.wait() == 1
    finally:
        source.write_text(text)
    tables = project / "results/gemma-4-tiny/tables/gemma4_gather_raw.manifest.json"
    built = tables.stat().st_mtime_ns
    release(project)
    assert tables.stat().st_mtime_ns == built
    assert sums(project) == expected
