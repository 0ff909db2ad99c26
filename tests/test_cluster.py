"""A Slurm on this machine gives the jobs of a lost node to another, and leaves nothing behind, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, ordinary_user
from workflow_scripts.checks import cluster
from workflow_scripts.checks.slurm_host import NoSlurm, ensure_installed, run_alone, slurm
from workflow_scripts.errors import UserError

with_slurm = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("slurmctld"),
    reason="needs Linux, root and the packages of Slurm: `make test-cluster` installs them",
)
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")

LOSE = """
import subprocess, sys, time
from pathlib import Path
from workflow_scripts.checks.slurm_host import slurm
home, logs = map(Path, sys.argv[1:])
with slurm(home, logs) as cluster:
    cluster.ask("scontrol", "update", "nodename=node2", "state=drain", "reason=later")
    cluster.ask("sbatch", "--requeue", "--output=/dev/null", "--wrap=sleep 1000")
    end = time.monotonic() + 60
    while not (jobs := cluster.running("node1")):
        assert time.monotonic() < end
        time.sleep(0.1)
    cluster.ask("scontrol", "update", "nodename=node2", "state=resume")
    cluster.lose("node1")
    end = time.monotonic() + 120
    while cluster.running("node2") != jobs:
        assert time.monotonic() < end
        time.sleep(0.2)
    print("again on node2")
"""


@pytest.fixture
def home():
    """A folder with a short path, for Slurm's sockets: that of pytest is too long."""
    with tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)  # munge wants its socket within reach of all
        yield Path(folder)


def daemons():
    return {process.pid for process in psutil.process_iter(["name"]) if process.info["name"] in DAEMONS}


@pytest.mark.cluster
@with_slurm
def test_the_job_of_a_lost_node_is_started_on_the_other(home, capfd):
    for folder in ("etc", "slurm", "logs"):
        (home / folder).mkdir()
    before, kept = daemons(), sorted(Path("/etc/slurm").iterdir())
    command = [sys.executable, "-c", LOSE, str(home / "slurm"), str(home / "logs")]
    assert run_alone(command, home / "etc") == 0, capfd.readouterr().err
    assert "again on node2" in capfd.readouterr().out
    assert len(cluster.restarted(home / "logs/slurmctld.log")) == 1
    assert cluster.placements(home / "logs/slurmctld.log") == ["node1", "node2"]
    assert daemons() == before
    assert sorted(Path("/etc/slurm").iterdir()) == kept


@pytest.mark.cluster
@with_slurm
@pytest.mark.skipif(
    not find_spec("snakemake_executor_plugin_slurm"), reason="envs/cluster.txt is not installed"
)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_check_that_is_ended(end, home):
    before = daemons()
    command = [sys.executable, "-m", "workflow_scripts.checks.cluster", "--logs", str(home / "logs")]
    # A shell that starts the tests in the background has them ignore SIGINT, and a child would go on ignoring it.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(home)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as check:
        try:
            wait_until(lambda: len(daemons() - before) >= len(DAEMONS) and check.poll() is None)
            (own,) = home.glob("cluster-*")
            check.send_signal(end)
            assert check.wait(60)
        finally:
            check.kill()
    wait_until(lambda: daemons() == before and not processes_in(own))
    assert end == signal.SIGKILL or not own.exists()


def test_a_folder_whose_sockets_would_have_too_long_names_is_refused(tmp_path):
    """Slurm would hold the first job for ever."""
    deep = tmp_path / ("x" * 80)
    deep.mkdir()
    with pytest.raises(UserError, match="TMPDIR"), slurm(deep, tmp_path):
        pass
    assert not list(deep.iterdir())


def wait_until(condition, seconds=90):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.2)


def processes_in(home):
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(home) in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes somebody else here")
def test_a_host_that_cannot_run_slurm_is_told_why():
    with ordinary_user(), pytest.raises(NoSlurm, match="need root"):
        ensure_installed()
