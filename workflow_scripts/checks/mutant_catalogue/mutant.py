"""What an entry of the catalogue is: data, and nothing that runs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TINY = "config/config.yaml"
TINY_QAT = "config/tiny-e4b-qat.yaml"
VERIFY = "verify"
"""`python -m workflow_scripts verify`, over a release that was finished before the fault."""
NEXT_RUN = "next run"
"""The start of Snakemake, which looks at finished results before it trusts them."""


@dataclass(frozen=True)
class Edit:
    """In a source file (from the project's root) the text `old`, which occurs once in it, becomes `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One fault, and who must catch it.

    `caught_by` is a gate, `stage NAME` for a stage that must refuse, `verify`, or `next run`; `target` is what it
    judges (the artifact of a stage). `judged` are the results to build, as paths from `results/MODEL` or names of
    rules; without any it is that gate over that target. `check` is a part of the reason that it must give. An `alone`
    mutant is run against all that a release needs, and only its gate may fail. `damage` is a fault in finished files
    instead of in sources, given the folder `results/MODEL`.
    """

    name: str
    fault: str
    caught_by: str
    target: str
    edits: tuple[Edit, ...] = ()
    judged: tuple[str, ...] = ()
    check: str = ""
    alone: bool = False
    config: str = TINY
    damage: Callable[[Path], None] | None = None

    @property
    def is_gate(self) -> bool:
        """Whether a gate must catch it, and not a stage or a later check."""
        return not self.caught_by.startswith("stage ") and self.caught_by not in (VERIFY, NEXT_RUN)

    @property
    def targets(self) -> tuple[str, ...]:
        """What Snakemake is asked for."""
        if self.alone or not (self.is_gate or self.judged):
            return ("release",)
        return self.judged or (f"gates/{self.caught_by}/{self.target}",)


def edited(
    name: str,
    fault: str,
    caught_by: str,
    target: str,
    file: str,
    old: str,
    new: str,
    check: str = "",
    alone: bool = False,
    judged: tuple[str, ...] = (),
    config: str = TINY,
) -> Mutant:
    """A mutant of one edit; `file` is given within the package."""
    edits = (Edit(f"workflow_scripts/{file}", old, new),)
    return Mutant(name, fault, caught_by, target, edits, judged, check, alone, config)
