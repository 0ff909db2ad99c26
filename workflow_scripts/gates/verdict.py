"""The verdict of a gate: `verdict.json` for machines, `measured.json` for figures, `measured_table.txt` for people.

`verdict.json` is part of a release and the same on every host; figures that may differ in their last digits from
host to host stay in the `measured` files, `measured_by_position.json` with those of every position if a gate has some.
They are written whether the gate passes or fails.
"""

import logging
import math
import platform
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workflow_scripts.errors import GateFailed, UserError
from workflow_scripts.files import write_atomic, write_json

BY_POSITION = "measured_by_position.json"
"""Series name -> a figure for each position, null where it is not finite."""

PREDICTED_BYTES, FOUND_BYTES = "bytes of constants, predicted", "bytes of constants, found"
"""Names of the figures with which gate `structure` compares a bundle's size."""

_LOG = logging.getLogger(__name__)
# What a damaged target or damaged evidence raises while it is read; numpy lets the last three through.
_UNREADABLE = (UserError, OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Check:
    """One comparison: what was asked, whether it held, and what was found (the same on every host when it holds)."""

    name: str
    passed: bool
    expected: str
    found: str


@dataclass
class Verdict:
    """Collects the checks of one gate over one target."""

    gate: str
    target: str
    bounds: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)

    def check(self, name: str, passed: bool, expected: str, found: str) -> None:
        """Add a comparison whose `found` text is the same on every host."""
        self.checks.append(Check(name, bool(passed), expected, found))

    def not_run(self, reason: str) -> None:
        """Say what of the gate this host cannot run, and why: the gate does not pass, even if all else holds."""
        self.reasons.append(reason)

    def at_most(self, name: str, value: float, bound: float, where: str = "") -> None:
        """Add a measured figure that must not exceed a bound; NaN fails, and a bound that bounds nothing."""
        self._measure(name, value, bound, value <= bound, "<=", where)

    def at_least(self, name: str, value: float, bound: float, where: str = "") -> None:
        """Add a measured figure that must not fall below a bound; NaN fails, and a bound that bounds nothing."""
        self._measure(name, value, bound, value >= bound, ">=", where)

    def by_position(self, name: str, values: Iterable[float]) -> None:
        """Keep a figure for each position, first to last, for the report; it decides nothing.

        A series that belongs to a check has the check's name, so that it is seen beside the check's bound.
        """
        # Six digits are more than a plot shows, and a long dialogue has hundreds of positions.
        self.series[name] = [float(f"{value:.6g}") for value in values]

    def _measure(self, name: str, value: float, bound: float, holds: bool, sign: str, where: str) -> None:
        self.bounds[name] = bound
        self.measured[name] = float(value)
        passed = bool(holds) and math.isfinite(bound)
        found = "within" if passed else f"{value:.6g}{' at ' + where if where else ''}"
        self.checks.append(Check(name, passed, f"{sign} {bound:.6g}", found))

    @contextmanager
    def concluding(self, out: Path) -> Iterator[None]:
        """Every gate's comparisons stand in this block; at its end the files are written, whatever happened in it.

        What cannot be read or run is a failed check. Raises GateFailed as `conclude` does.
        """
        try:
            yield
        except _UNREADABLE as problem:
            _LOG.exception("the gate could not go on")
            plain = isinstance(problem, UserError)
            message = str(problem) if plain else f"{type(problem).__name__}: {problem}"
            self.check("the target is read and runs", False, "no error", message)
        self.conclude(out)

    def conclude(self, out: Path) -> None:
        """Write the files; raises GateFailed naming target, check, expected and found where a check failed.

        A gate that compared nothing has failed, unless it says why it could not. It is `not_run` where a part of it
        could not be run and no check of the rest failed.
        """
        if not self.checks and not self.reasons:
            self.check("comparisons", False, "at least one", "none")
        failed = [check for check in self.checks if not check.passed]
        reasons = [f"{c.name}: expected {c.expected}, found {c.found}" for c in failed] or self.reasons
        reason = "; ".join(reasons) or None
        record = {
            "gate": self.gate,
            "target": self.target,
            "verdict": "fail" if failed else "not_run" if self.reasons else "pass",
            "reason": reason,
            "bounds": _finite(self.bounds),
            "checks": [check.__dict__ for check in self.checks],
            "tokens": self.tokens,
        }
        write_json(out / "verdict.json", record)
        write_json(out / "measured.json", {**_finite(self.measured), "machine": _machine()})
        if self.series:
            figures = {name: _finite_only(values) for name, values in self.series.items()}
            write_json(out / BY_POSITION, figures)
        write_atomic(out / "measured_table.txt", self.table())
        if failed:
            raise GateFailed(f"gate {self.gate} failed on {self.target}: {reason}")

    def table(self) -> str:
        """The checks as an aligned text table, figures included."""
        rows = [("check", "", "expected", "found")]
        for check in self.checks:
            value = self.measured.get(check.name)
            found = check.found if value is None else f"{value:.6g}"
            rows.append((check.name, "ok" if check.passed else "FAIL", check.expected, found))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        lines += [f"not run: {reason}" for reason in self.reasons]
        return f"gate {self.gate} on {self.target}\n" + "\n".join(lines) + "\n"


def _machine() -> str:
    """What the bundles ran on: another machine's runtime may round otherwise."""
    return f"{platform.system()} {platform.machine()}"


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures as JSON can hold them: null for NaN and infinity, which the checks name."""
    return dict(zip(figures, _finite_only(figures.values()), strict=True))


def _finite_only(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
