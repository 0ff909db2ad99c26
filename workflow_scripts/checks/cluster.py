"""`make test-cluster`: what Slurm's nodes build, one of them lost on the way, must have the bytes of a plain release.

Slurm runs on this machine with two nodes. The run has a checkout and a store of its own, both empty.
"""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.checks.reproduce import first_difference
from workflow_scripts.checks.slurm_host import (
    NODES,
    PARTITION,
    NoSlurm,
    Slurm,
    ensure_installed,
    run_alone,
    slurm,
)
from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError

LOGS = ROOT / "logs/cluster"
NOT_RUN = 77  # the exit code by which test suites know what this host cannot run
_LOST_AFTER = 20  # per cent of the jobs
_PROFILE = ("--workflow-profile", "profiles/slurm")
# Two CPUs are enough; without an accounting database only squeue knows how a job ended; and nobody waits here for as
# long as on a real cluster.
_SITE = (
    *("--set-threads", "weights=1", "tables=1"),
    *("--default-resources", f"slurm_partition={PARTITION}", "mem_mb=1000", "runtime=60", "disk_mb=1000"),
    *("--slurm-no-account", "--slurm-status-command", "squeue"),
    *("--slurm-init-seconds-before-status-checks", "3", "--latency-wait", "10"),
)


class Watch:
    """Reads what Snakemake prints and takes a node away once, when part of the jobs is done and it is at work."""

    def __init__(self, cluster: Slurm, log: Path) -> None:
        self.cluster = cluster
        self.log = log
        self.lost: list[str] = []  # the jobs that were on it

    def on_line(self, line: str) -> None:
        """Keep a line, and act on it."""
        with self.log.open("a", encoding="utf-8") as log:
            print(time.strftime("%H:%M:%S"), line, file=log)
        if progress := re.search(r"(\d+) of (\d+) steps", line):
            print(f"\r  {progress[0]} done", end="", file=sys.stderr, flush=True)
            if not self.lost and 100 * int(progress[1]) >= _LOST_AFTER * int(progress[2]):
                self._lose()

    def _lose(self) -> None:
        node = NODES[0]
        if jobs := self.cluster.running(node):
            self.lost = jobs
            self.cluster.lose(node)
            print(f"\n  {node} is lost, and with it jobs {', '.join(jobs)} of Slurm", flush=True)


def main(arguments: list[str]) -> int:
    """Build on Slurm and compare; returns the exit code."""
    options = _options().parse_args(arguments)
    if options.inside:
        return _inside(options)
    if not find_spec("snakemake_executor_plugin_slurm"):
        raise UserError("no executor for Slurm: `make test-cluster` installs it (envs/cluster.txt)")
    ensure_installed()
    logs = options.logs.resolve()
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="cluster-") as home:
        Path(home).chmod(0o755)  # munge wants its socket within reach of all
        etc = Path(home) / "etc"
        etc.mkdir()
        own = [sys.executable, "-m", "workflow_scripts.checks.cluster", *arguments, "--inside", home]
        code = run_alone(own, etc)
    print(f"logs: {logs}")
    return code


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("--config", help="a model file instead of the embedded tiny model")
    parser.add_argument("--logs", type=Path, default=LOGS, help="a folder for logs, which is made anew")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    return parser


def _inside(options: argparse.Namespace) -> int:
    """The check itself, in a namespace of its own and an empty folder."""
    config = ["--configfile", str(Path(options.config).resolve())] if options.config else []
    projects = [options.inside / name for name in ("on slurm", "plain")]
    for project in projects:  # both of the same moment
        copy_project(project)
    built = _on_slurm(options.inside, options.logs.resolve(), projects[0], config)
    plain = _plainly(projects[1], config)
    if difference := first_difference(plain, built):
        print(f"the cluster's release is another one: {difference}", file=sys.stderr)
        return 1
    files = len((built / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    print(f"equal: {files} files and SHA256SUMS itself, built by Slurm's nodes and plainly")
    return 0


def _on_slurm(home: Path, logs: Path, project: Path, config: list[str]) -> Path:
    (home / "slurm").mkdir()
    start = time.monotonic()
    print("building on two nodes of Slurm", flush=True)
    with slurm(home / "slurm", logs) as cluster:
        watch = Watch(cluster, logs / "snakemake.log")
        own = {"GEMMA4_STORE": str(home / "store")}
        arguments = ["release", *_PROFILE, *_SITE, "--slurm-logdir", str(logs / "jobs"), *config]
        build(project, *arguments, environment=own, on_line=watch.on_line)
        if not watch.lost:
            raise UserError("no node was at work when one was to be lost: this run shows nothing")
        again = restarted(logs / "slurmctld.log")
    if not again:  # of those that were running a moment before, some may have ended
        raise UserError(f"Slurm started none of jobs {', '.join(watch.lost)} again; see {logs}/slurmctld.log")
    placed = placements(logs / "slurmctld.log")
    shares = ", ".join(f"{placed.count(node)} on {node}" for node in NODES)
    print(f"\n  {time.monotonic() - start:.0f} s; {shares}; started again: {len(again)}", flush=True)
    return _release(project)


def _plainly(project: Path, config: list[str]) -> Path:
    start = time.monotonic()
    print("building plainly", flush=True)
    store = {"GEMMA4_STORE": os.environ.get("GEMMA4_CHECK_STORE") or "off"}
    build(project, "release", *config, environment=store)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return _release(project)


def restarted(log: Path) -> list[str]:
    """Numbers of the jobs that Slurm's controller put back in the queue for a lost node."""
    return re.findall(r"requeue job JobId=(\d+) due to failure of node", log.read_text(encoding="utf-8"))


def placements(log: Path) -> list[str]:
    """The node of every start of a job, from the log of Slurm's controller: of its scheduler, or of the backfill."""
    text = log.read_text(encoding="utf-8")
    return re.findall(r"(?:Allocate JobId=\d+ NodeList=|Started JobId=\d+ in \S+ on )(\S+)", text)


def _release(project: Path) -> Path:
    (release,) = project.glob("results/*/release")
    return release


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)  # so that it ends as Ctrl-C does
    try:
        sys.exit(main(sys.argv[1:]))
    except NoSlurm as reason:
        print(f"not run: {reason}", file=sys.stderr)
        sys.exit(NOT_RUN)
    except UserError as problem:
        sys.exit(f"error: {problem}")
    except KeyboardInterrupt:
        sys.exit("interrupted: everything it started is stopped")
