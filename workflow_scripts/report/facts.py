"""Everything that the summary and the report show, read from the results of one model."""

import json
import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from workflow_scripts.errors import UserError
from workflow_scripts.gates.verdict import BY_POSITION
from workflow_scripts.manifest import tree_path
from workflow_scripts.usage.disk import manifests
from workflow_scripts.usage.record import Record, read_records


class Kind(StrEnum):
    """What a figure's distance from its bound means."""

    MARGIN = "margin"
    """The nearer the bound, the nearer to a failure."""
    EXACT = "exact"
    """The bound is 0, so it is met to the bit or not at all."""
    ROUNDING = "rounding"
    """The bound is half a step, which right rounding comes near to as soon as there are enough numbers."""
    COUNT = "count"
    """A number of things that must be there; as many as are asked for is no near miss."""


@dataclass(frozen=True)
class Check:
    """One comparison: what was asked, what was found."""

    name: str
    expected: str
    found: str
    passed: bool
    used: float | None
    """Share of the bound that was used up, for a figure with a bound; above 1 it failed."""
    kind: Kind | None
    """None where there is no figure with a bound."""

    @property
    def margin(self) -> float | None:
        """The used share of the bound where that says how near a failure is, and of every figure that failed."""
        return self.used if self.kind is Kind.MARGIN or not self.passed else None


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
        """The check that came nearest to its bound, among those where that means something."""
        bounded = [check for check in self.checks if check.margin is not None]
        return max(bounded, key=lambda check: check.margin, default=None)

    @property
    def stops(self) -> bool:
        """Whether there can be no release with this verdict."""
        return self.verdict == "fail" or (self.required and self.verdict != "pass")


@dataclass(frozen=True)
class Facts:
    """A release (its `release.json`), its gates, recipe -> quality report of its weights, what the jobs took.

    Of a run that was stopped by a gate there is no release: `release` then has names and nothing that was built.
    """

    release: dict[str, Any]
    gates: list[Gate]
    quality: dict[str, dict[str, Any]]
    jobs: list[Record]
    stopped: bool = False
    unreached: list[str] = field(default_factory=list)
    """Gates (`<gate>_<target>`) of a stopped run that it did not get to."""

    @classmethod
    def read(cls, results: Path) -> Self:
        """The results of a model, such as `results/gemma-4-tiny`. Raises UserError where there is no release."""
        path = results / "release" / "release.json"
        try:
            release = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} is missing: build the release first") from None
        return cls(release, list(_gates(results, release["gates"])), *_beside(results, release["recipes"]))

    @classmethod
    def of_stopped_run(
        cls,
        results: Path,
        names: Mapping[str, Any],
        gates: Mapping[str, Path],
        required: Container[str],
        pending: Container[str],
        since: float,
    ) -> Self:
        """What a run that made no release leaves; a release that lies there is of an earlier run.

        `names` has `model`, `slug` and `recipes` (names); `gates` gives `<gate>_<target>` -> manifest of the verdict;
        `pending` are the outputs that the run should have made and did not; `since` is the time of its start.
        A gate that failed leaves no manifest but its verdict, which is of this run if it is not older.
        """
        verdicts, unreached = {}, []
        for name, manifest in gates.items():
            path = tree_path(manifest) / "verdict.json"
            waits = str(manifest) in pending
            entry = _json(path) if not waits or (path.is_file() and path.stat().st_mtime >= since) else {}
            if entry:
                verdicts[name] = entry | {"required": name in required}
            else:
                unreached.append(name)
        release = {
            "model": names["model"],
            "slug": names["slug"],
            "gates": verdicts,
            "recipes": dict.fromkeys(names["recipes"]),
            "folders": {},
            "aot": {},
        }
        known = _beside(results, release["recipes"])
        return cls(release, list(_gates(results, verdicts)), *known, stopped=True, unreached=unreached)

    def stopping(self) -> list[Gate]:
        """The gates without whose pass there is no release: empty for one that was built."""
        return [gate for gate in self.gates if gate.stops]

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


def _beside(results: Path, recipes: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Record]]:
    """Recipe -> quality report of its weights, where there is one; and what the jobs took."""
    reports = {recipe: results / "weights" / recipe / "report.json" for recipe in recipes}
    quality = {recipe: _json(report) for recipe, report in reports.items() if report.is_file()}
    records = read_records(results, dict(manifests(results)))
    return quality, [record for record in records if "coreml" not in record.stage]  # an extra, of no release


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
    used = kind = None
    if bound is not None and isinstance(found, int | float):
        at_least = check["expected"].startswith(">=")
        above, below = (bound, found) if at_least else (found, bound)
        used = above / below if below > 0 else math.inf if above > below else 0.0
        kind = _kind(name, bound, found, at_least)
    text = check["found"] if found is None else f"{found:.4g}"
    return Check(name, check["expected"], text, check["passed"], used, kind)


def _kind(name: str, bound: float, found: float, at_least: bool) -> Kind:
    if at_least and float(bound).is_integer() and float(found).is_integer():
        return Kind.COUNT
    if bound == 0:
        return Kind.EXACT
    if bound == 0.5 and ("in ulp" in name or "in steps" in name):
        return Kind.ROUNDING
    return Kind.MARGIN


def _json(path: Path) -> dict[str, Any]:
    """An object of a file, empty where there is none: a result from an older build has fewer files."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
