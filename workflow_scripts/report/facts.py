"""Everything that the summary and the report show, read from the results of one model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from workflow_scripts.errors import UserError
from workflow_scripts.gates.verdict import BY_POSITION
from workflow_scripts.usage.disk import manifests
from workflow_scripts.usage.record import Record, read_records


@dataclass(frozen=True)
class Check:
    """One comparison with a figure: how it was bounded, what was found (None: no number)."""

    name: str
    expected: str
    found: str
    passed: bool
    used: float | None
    """Share of the bound that was used up, for a figure with a bound; above 1 it failed."""


@dataclass(frozen=True)
class Gate:
    """A gate over a target; `target` is the folder of its result below that of the gate."""

    gate: str
    target: str
    verdict: str
    reason: str | None
    required: bool
    checks: list[Check]
    bounds: dict[str, float]
    measured: dict[str, Any]
    series: dict[str, list[float]]

    @property
    def tightest(self) -> Check | None:
        """The check that used most of its bound."""
        bounded = [check for check in self.checks if check.used is not None]
        return max(bounded, key=lambda check: check.used, default=None)


@dataclass(frozen=True)
class Facts:
    """A release (its `release.json`), its gates, recipe -> quality report of its weights, what the jobs took."""

    release: dict[str, Any]
    gates: list[Gate]
    quality: dict[str, dict[str, Any]]
    jobs: list[Record]

    @classmethod
    def read(cls, results: Path) -> Self:
        """The results of a model, such as `results/gemma-4-tiny`. Raises UserError where there is no release."""
        path = results / "release" / "release.json"
        try:
            release = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} is missing: build the release first") from None
        reports = {recipe: results / "weights" / recipe / "report.json" for recipe in release["recipes"]}
        quality = {recipe: _json(report) for recipe, report in reports.items() if report.is_file()}
        jobs = list(read_records(results, dict(manifests(results))))
        return cls(release, list(_gates(results, release["gates"])), quality, jobs)

    def not_done(self) -> list[str]:
        """What the host could not do, and why: gates that were not run, bundles that were not compiled."""
        lines = [
            f"gate {gate.gate} on {gate.target}: {gate.reason}"
            for gate in self.gates
            if gate.verdict == "not_run"
        ]
        return lines + [
            f"{folder}: {entry['not_built']}"
            for folder, entry in self.release["aot"].items()
            if entry["not_built"]
        ]


def _gates(results: Path, listed: dict[str, dict[str, Any]]) -> Iterator[Gate]:
    """The gates of a release, with the host's figures from their results."""
    for name, entry in listed.items():
        target = name.removeprefix(f"{entry['gate']}_")
        folder = results / "gates" / entry["gate"] / target
        measured, series = _json(folder / "measured.json"), _json(folder / BY_POSITION)
        checks = [_check(check, entry["bounds"], measured) for check in entry["checks"]]
        yield Gate(
            gate=entry["gate"],
            target=target,
            verdict=entry["verdict"],
            reason=entry["reason"],
            required=entry["required"],
            checks=checks,
            bounds=entry["bounds"],
            measured=measured,
            series=series,
        )


def _check(check: dict[str, Any], bounds: dict[str, float], measured: dict[str, Any]) -> Check:
    name, found, bound = check["name"], measured.get(check["name"]), bounds.get(check["name"])
    used = None
    if bound is not None and isinstance(found, int | float):
        at_least = check["expected"].startswith(">=")
        above, below = (bound, found) if at_least else (found, bound)
        used = above / below if below > 0 else float(above > below)
    text = check["found"] if found is None else f"{found:.4g}"
    return Check(name, check["expected"], text, check["passed"], used)


def _json(path: Path) -> dict[str, Any]:
    """An object of a file, empty where there is none: a result from an older build has fewer files."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
