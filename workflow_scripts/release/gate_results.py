"""Verdicts of gates as a release needs them, and the refusal of a release that lacks one."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError
from workflow_scripts.manifest import tree_path

VERDICTS = ("pass", "fail", "not_run")


@dataclass(frozen=True)
class GateResult:
    """One gate: its name in the release, the content of verdict.json, and the host's figures (may be empty)."""

    name: str
    verdict: dict[str, Any]
    measured: dict[str, Any]

    @property
    def passed(self) -> bool:
        """True only for the verdict `pass`."""
        return self.verdict["verdict"] == "pass"

    @property
    def not_run(self) -> bool:
        """True where the host could not run the gate."""
        return self.verdict["verdict"] == "not_run"

    @property
    def reason(self) -> str:
        """Why it did not pass."""
        return self.verdict["reason"] or "no reason was given"


def read_gate(name: str, folder: Path) -> GateResult:
    """Read a gate result; UserError where its verdict is none of pass, fail, not_run."""
    verdict = _read(folder / "verdict.json")
    missing = {"gate", "target", "verdict", "reason", "bounds", "checks"} - verdict.keys()
    if missing or verdict["verdict"] not in VERDICTS:
        problem = f"lacks {', '.join(sorted(missing))}" if missing else f"says {verdict['verdict']!r}"
        raise UserError(
            f"{folder / 'verdict.json'} {problem}: it is no gate's verdict; delete it and run again"
        )
    measured = folder / "measured.json"
    return GateResult(name, verdict, _read(measured) if measured.is_file() else {})


def require(names: list[str], gates: Mapping[str, GateResult]) -> None:
    """Raise UserError naming every gate that stops the release, and why.

    These are the required ones (`names`) that are missing, failed or were not run, and any other that failed.
    """
    problems = [
        f"`{name}` on {gate.verdict['target']}: {gate.verdict['verdict']} ({gate.reason})"
        for name, gate in gates.items()
        if not gate.passed and (name in names or not gate.not_run)
    ]
    problems += [f"`{name}` is missing: no gate of that name was run" for name in names if name not in gates]
    if problems:
        raise UserError("gates stop the release: " + "; ".join(problems))


def not_run(manifests: Iterable[Path]) -> list[str]:
    """A line for each gate result among finished ones that the host could not run."""
    gates = [read_gate(manifest.name, tree_path(manifest)) for manifest in manifests]
    return [
        f"not run: gate {gate.verdict['gate']} on {gate.verdict['target']}: {gate.reason}"
        for gate in gates
        if gate.not_run
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the gate did not finish") from None
    except ValueError as problem:
        raise UserError(f"{path} is no readable JSON: {problem}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value
