"""`verify RELEASE --rebuild`: build a release again from this checkout, in a copy and without a store, and compare.

Whoever doubts that a release is what this code makes of that checkpoint does not have to believe its records.
"""

import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from workflow_scripts.checks.clone import build, copy_project
from workflow_scripts.checks.compare import Comparison, compare
from workflow_scripts.closure import ROOT
from workflow_scripts.config import overlay, read_config
from workflow_scripts.coreai.aot_host import aot_available
from workflow_scripts.errors import UserError
from workflow_scripts.release import schema, seal
from workflow_scripts.release.names import MEASURED, RELEASE, SUMS

_JOBS = re.compile(r"total +(\d+)")
_DONE = re.compile(r"(\d+) of (\d+) steps")


def rebuild(release: Path, configfile: Path | None, workdir: Path | None) -> int:
    """Build again a release that was just verified, and print what differs; 0 if nothing does, else 1.

    `configfile` is the model file that it was built with (None: found in `config/`), `workdir` where the copy is made
    (None: the system's temporary folder). Raises UserError where there is no such file, or the build fails.
    """
    document = seal.open_sealed((release / RELEASE).read_bytes())
    schema.check_release(document)
    configfile = configfile or find_config(document["model"], ROOT / "config")
    settings = settings_of(configfile, document["model"])
    if workdir and not workdir.is_dir():
        raise UserError(f"--workdir {workdir} is not a folder")
    with _interrupted_by_any_end(), tempfile.TemporaryDirectory(prefix="rebuild-", dir=workdir) as place:
        home, start = Path(place).resolve(), time.monotonic()
        print(f"building it again with {configfile}, without a store, in {home}", flush=True)
        comparison = compare(release, _build(home, document["model"], settings))
        print(f"built again in {time.monotonic() - start:.0f} s")
    for line in report(comparison):
        print(line)
    return 1 if comparison.differences else 0


def find_config(model: str, folder: Path) -> Path:
    """The file of a folder of configurations that is of a model; UserError where none is, or several are."""
    found = [path for path in sorted(folder.glob("*.yaml")) if _read(path).get("model") == model]
    match found:
        case [path]:
            return path
        case []:
            raise UserError(f"no file of {folder} is of model {model}: name it with --configfile")
    names = ", ".join(path.name for path in found)
    raise UserError(f"several files of {folder} are of model {model} ({names}): name one with --configfile")


def settings_of(configfile: Path, model: str) -> dict[str, Any]:
    """The content of a model file as the copy needs it. Raises UserError where it is none, or of another model.

    A local checkpoint lies where it did, whether git would copy it or not. A compiler that must be there for a release
    to be made need not for its other parts to be checked.
    """
    config, settings = read_config([configfile]), _read(configfile)
    if config.model != model:
        raise UserError(f"{configfile} is of model {config.model}, the release of {model}")
    if not config.checkpoint.repository:
        source = str((ROOT / config.checkpoint.source).resolve())
        settings = overlay(settings, {"checkpoint": {"source": source}})
    if config.aot_mode == "require" and not aot_available():
        settings = overlay(settings, {"aot": {"mode": "auto"}})
    return settings


def report(comparison: Comparison) -> list[str]:
    """The lines for people: what was not compared and why, what differs, and the outcome."""
    reasons = sorted((reason, name) for name, reason in comparison.left_out.items())
    lines = [
        f"not compared: {', '.join(name for _, name in group)}, because {reason}"
        for reason, group in groupby(reasons, key=lambda pair: pair[0])
    ]
    lines += [f"{path} {difference}" for path, difference in sorted(comparison.differences.items())]
    if comparison.differences:
        return [
            *lines,
            f"not the same: {len(comparison.differences)} differ, {comparison.files} files are equal",
        ]
    rest = f"{SUMS} itself" if comparison.identical else "what the records say of all that was compared"
    return [
        *lines,
        f"the same: {comparison.files} files are equal, and so is {rest}; {MEASURED} has figures of one host",
    ]


class Progress:
    """Of what Snakemake prints, the lines of its jobs, on stderr, with how many jobs are done."""

    def __init__(self) -> None:
        self._done = ""

    def __call__(self, line: str) -> None:
        """Take the next line."""
        if match := _JOBS.fullmatch(line):
            self._done = f"0/{match[1]}"
        elif match := _DONE.match(line):
            self._done = f"{match[1]}/{match[2]}"
        elif self._done and line.startswith("  "):  # as the stage runner prints them
            print(f"{self._done}{line}", file=sys.stderr, flush=True)


@contextmanager
def _interrupted_by_any_end() -> Iterator[None]:
    """Let a closed terminal and SIGTERM end this process as Ctrl-C does, so that no tens of GB are left behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    for one, handler in before.items():
        if handler is signal.SIG_DFL:  # under nohup it is ignored
            signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _build(home: Path, model: str, settings: Mapping[str, Any]) -> Path:
    project, temporary = home / "project", home / "temporary"
    copy_project(project)
    temporary.mkdir()
    (home / "model.yaml").write_text(yaml.safe_dump(dict(settings), allow_unicode=True), encoding="utf-8")
    environment = {"GEMMA4_STORE": "off", "TMPDIR": str(temporary)}
    build(
        project,
        "release",
        "--configfile",
        str(home / "model.yaml"),
        environment=environment,
        on_line=Progress(),
    )
    return project / "results" / model / "release"


def _read(path: Path) -> dict[str, Any]:
    """A YAML file with keys at its top; no keys where it is none, which the check of the configuration tells."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return raw if isinstance(raw, dict) else {}
