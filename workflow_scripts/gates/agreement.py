"""Gate `agreement`: every folder that chats gave the same ids, bit by bit, to whatever several of them were asked.

Each folder is judged against the original by its own gates. Here they are held against each other: what a user asks of
`macos` and of `ios-gpu` has one answer, and no folder passed by being asked less.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from workflow_scripts.gates.verdict import Verdict

Ids = Mapping[str, list[int]]


def gate_agreement(verdict: Verdict, folders: Mapping[str, Ids], positions: Mapping[str, int]) -> None:
    """`folders` maps each folder to dialogue -> ids, `positions` to its room.

    The longest list of a dialogue is its measure. A folder may have fewer ids, or lack a dialogue, only if it has less
    room than the one with the most.
    """
    names = sorted({name for ids in folders.values() for name in ids})
    verdict.check("folders that chat", len(folders) > 1, "at least two", str(len(folders)))
    if not names:
        verdict.check("dialogues", False, "at least one", "none")
    for name in names:
        _check_dialogue(verdict, name, {folder: ids.get(name) for folder, ids in folders.items()}, positions)


def _check_dialogue(
    verdict: Verdict, name: str, found: Mapping[str, list[int] | None], positions: Mapping[str, int]
) -> None:
    longest = max(found, key=lambda folder: (len(found[folder] or []), positions[folder]))
    measure = found[longest] or []
    differences = {
        folder: _difference(ids, measure, positions[folder] < positions[longest])
        for folder, ids in found.items()
    }
    problems = [f"{folder}: {said}, as in {longest}" for folder, said in differences.items() if said]
    asked = sum(ids is not None for ids in found.values())
    digest = hashlib.sha256(np.array(measure, "<i4").tobytes()).hexdigest()[:16]
    text = f"{len(measure)} ids {digest} in {asked} folders"
    verdict.check(name, not problems, text, text if not problems else problems[0])


def _difference(ids: list[int] | None, measure: list[int], smaller: bool) -> str | None:
    """What is wrong with a folder's ids, if anything."""
    if ids is None:
        return None if smaller else "was not asked"
    for index, (have, want) in enumerate(zip(ids, measure, strict=False)):
        if have != want:
            return f"{have} at index {index}, not {want}"
    return None if len(ids) == len(measure) or smaller else f"{len(ids)} ids, not {len(measure)}"
