"""A Slurm of two nodes on one machine, from the distribution's own programs, for checks.

Everything lies in one folder, and everything runs in namespaces of its own: when the process that made them ends,
however it ends, the kernel ends the rest, and what was mounted over Slurm's configuration is gone.
"""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from workflow_scripts.errors import UserError

PACKAGES = ("slurm-wlm", "munge")  # of Debian and Ubuntu
NODES = ("node1", "node2")
PARTITION = "main"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "unshare", "setpriv")
_STARTING = 60  # seconds
_SOCKET = 107  # characters of a path to a socket on Linux
# Where Slurm looks by itself. SLURM_CONF does not do: the plugin's job steps take every such variable away before they
# call srun (snakemake-executor-plugin-slurm-jobstep 0.6.1).
_ETC = Path("/etc/slurm")

# Both slurmd hear on ports of their own. A job whose node is lost may start again once its credential has expired,
# after two minutes by default.
_CONFIG = """\
ClusterName=check
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=10
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory={memory}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory={memory}
PartitionName={partition} Nodes={all_nodes} Default=YES State=UP
"""


class NoSlurm(UserError):
    """This host cannot run Slurm: the message says why. No verdict on the project."""


@dataclass(frozen=True)
class Slurm:
    """A running Slurm: its daemons by node."""

    daemons: dict[str, subprocess.Popen]

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints; raises UserError where it fails."""
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise UserError(f"`{' '.join(command)}` failed: {run.stderr.strip()}")
        return run.stdout

    def running(self, node: str) -> list[str]:
        """Numbers of the jobs at work on a node."""
        return self.ask(
            "squeue", "--noheader", "--states=running", f"--nodelist={node}", "--format=%i"
        ).split()

    def lose(self, node: str) -> None:
        """Take a node away as a power cut does: its daemon and all of its jobs at once, then tell the controller."""
        self.daemons[node].kill()
        while processes := list(_of_node(node)):
            for process in processes:
                _kill(process)
            time.sleep(0.1)
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")


def ensure_installed() -> None:
    """Install Slurm where it is missing and this host allows it; raises NoSlurm with the reason where it does not."""
    if not sys.platform.startswith("linux"):
        raise NoSlurm("Slurm runs on Linux only")
    if os.geteuid():
        raise NoSlurm(
            "Slurm's daemons and a process namespace for them need root; run it in a container as root"
        )
    missing = [program for program in _PROGRAMS if not shutil.which(program)]
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise NoSlurm(f"there is no {missing[0]}, and no apt-get to install {' and '.join(PACKAGES)} with")
    print(f"installing {' and '.join(PACKAGES)} with apt-get", flush=True)
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *PACKAGES]):
        run = subprocess.run(
            ["apt-get", *command],
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise NoSlurm(
                f"`apt-get {' '.join(command)}` failed: {(run.stderr or run.stdout).strip()[-500:]}"
            )
    if missing := [program for program in _PROGRAMS if not shutil.which(program)]:
        raise NoSlurm(f"the packages {' and '.join(PACKAGES)} have no {', '.join(missing)}")


def run_alone(command: Sequence[str], etc: Path) -> int:
    """Run a command in namespaces of its own, with a folder in the place of Slurm's configuration; its exit code.

    It is the first process there, so nothing of it is left when it ends or this process does. Raises NoSlurm where
    this host allows no namespaces.
    """
    if not _ETC.is_dir():
        raise NoSlurm(f"this host's Slurm does not have its configuration in {_ETC}")
    # setpriv ends unshare with this process, and unshare ends the first process of the namespaces.
    alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    alone += ["sh", "-c", f'mount --bind "$0" {_ETC} && exec "$@"', str(etc)]
    tried = subprocess.run([*alone, "true"], capture_output=True, text=True)
    if tried.returncode:
        raise NoSlurm(f"this host allows no namespaces: {tried.stderr.strip()}")
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run([*alone, *command], env=plain).returncode


@contextmanager
def slurm(home: Path, logs: Path) -> Iterator[Slurm]:
    """Run Slurm in a folder that exists, to be called in what `run_alone` runs.

    Raises UserError where the nodes do not get ready, with what the daemons said last, and where the folder's path is
    too long for their sockets.
    """
    _check_length(home)
    _configure(home, logs)
    daemons: dict[str, subprocess.Popen] = {}

    def start(name: str, *command: str) -> None:
        with (logs / f"{name}.out").open("wb") as out:
            daemons[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    running = Slurm(daemons)
    try:
        key = home / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        own = {"key-file": key, "socket": home / "munge.socket", "seed-file": home / "munge.seed"}
        own |= {"pid-file": home / "munged.pid", "log-file": logs / "munged.log"}
        start(
            "munged", "munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in own.items())
        )
        _wait((home / "munge.socket").exists, "munged", daemons, logs)
        start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node)
        _wait(lambda: _are_idle(running), "two idle nodes", daemons, logs)
        yield running
    finally:
        for daemon in reversed(daemons.values()):
            daemon.kill()
            daemon.wait()


def _check_length(home: Path) -> None:
    """A job step whose socket has too long a name dies, and Slurm holds its job for ever."""
    longest = len(f"{home}/spool-{NODES[0]}/{NODES[0]}_1234567.4294967291")
    if longest > _SOCKET:
        raise UserError(
            f"Slurm's sockets would have {longest} characters below {home}, and at most {_SOCKET} are possible: set "
            "TMPDIR to a folder with a shorter path"
        )


def _configure(home: Path, logs: Path) -> None:
    with (
        closing(socket.socket()) as first,
        closing(socket.socket()) as second,
        closing(socket.socket()) as third,
    ):
        ports = []
        for one in (first, second, third):
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    (home / "state").mkdir()
    (_ETC / "slurm.conf").write_text(
        _CONFIG.format(
            host=socket.gethostname().partition(".")[0],
            home=home,
            logs=logs,
            ports=ports,
            nodes=NODES,
            all_nodes=",".join(NODES),
            partition=PARTITION,
            cpus=len(os.sched_getaffinity(0)),
            memory=psutil.virtual_memory().total // len(NODES) // 2**20,
        )
    )


def _are_idle(running: Slurm) -> bool:
    try:
        return running.ask("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * len(NODES)
    except UserError:  # the controller does not hear yet
        return False


def _wait(ready: Callable[[], bool], what: str, daemons: dict[str, subprocess.Popen], logs: Path) -> None:
    end = time.monotonic() + _STARTING
    while not ready():
        ended = [name for name, daemon in daemons.items() if daemon.poll() is not None]
        if ended or time.monotonic() > end:
            tails = [path.read_text(errors="replace")[-500:].strip() for path in sorted(logs.glob("*.out"))]
            said = "\n".join(filter(None, tails)) or "nothing"
            raise UserError(
                f"Slurm did not get ready ({what}; ended: {', '.join(ended) or 'none'}). It said:\n{said}"
            )
        time.sleep(0.2)


def _of_node(node: str) -> Iterator[psutil.Process]:
    """The processes of a node's jobs, and the Slurm processes that watch over them."""
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("SLURMD_NODENAME") == node:
                parent = process.parent()
                if parent and parent.name().startswith("slurmstepd"):
                    yield parent
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
