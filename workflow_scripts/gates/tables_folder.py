"""Part of every gate that runs a folder: the tables of another folder that it reads are those the gate was given."""

from collections.abc import Set
from pathlib import Path

from workflow_scripts.gates.verdict import Verdict


def gate_tables_folder(verdict: Verdict, read: Set[Path], given: Path | None) -> None:
    """The other folders (resolved) that a plan leads to are the packaged one that is an input, or none if none is.

    A verdict holds for the gate's inputs, and the tables must be one of them: else it would outlive their change.
    """
    wanted = {given.resolve()} if given else set()
    if read | wanted:
        name = given.name if given else "none"
        found = name if read == wanted else ", ".join(sorted(map(str, read))) or "none"
        verdict.check("plan: folder of the tables", read == wanted, name, found)
