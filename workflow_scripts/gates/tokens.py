"""Gate `tokens` (and `long_run`): a packaged set of bundles repeats the oracle's answers id by id.

The oracle's own ids are fed back, so every gated position is judged on the right context, the stop token included;
a set that passes answers the same when it runs freely.
"""

import numpy as np

from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict

LONG_RUN = 256  # positions; a sliding cache has wrapped and errors had time to add up


def is_long(dialogue: Dialogue) -> bool:
    """True for a dialogue that belongs to the gate `long_run`."""
    return len(dialogue.fed_ids) >= LONG_RUN


def dialogues_of(verdict: Verdict, oracle: Oracle, long_run: bool) -> list[Dialogue]:
    """The dialogues of one of the two gates; that there is none is a failed check."""
    kind = "reaches" if long_run else "stays under"
    dialogues = [dialogue for dialogue in oracle.dialogues.values() if is_long(dialogue) == long_run]
    if not dialogues:
        verdict.check(
            "dialogues",
            False,
            f"one that {kind} {LONG_RUN} positions",
            f"no dialogue {kind} {LONG_RUN} positions",
        )
    return dialogues


def that_fit(verdict: Verdict, dialogues: list[Dialogue], context: int) -> list[Dialogue]:
    """Those of some dialogues that a set of bundles has room for; the verdict says which it has not.

    That there is none is a failed check.
    """
    fit = [dialogue for dialogue in dialogues if len(dialogue.fed_ids) <= context]
    left_out = [dialogue.name for dialogue in dialogues if len(dialogue.fed_ids) > context]
    if left_out:
        names = ", ".join(dialogue.name for dialogue in fit) or "none"
        reason = f"{', '.join(left_out)} not fed: longer than the {context} positions of this set"
        verdict.check("dialogues that fit", bool(fit), "at least one", f"{names}; {reason}")
    return fit


def gate_tokenizer(verdict: Verdict, dialogue: Dialogue, encoded: list[int], decoded: str) -> None:
    """The packaged tokenizer and template give the oracle's prompt ids and answer text (they are other code).

    `encoded` are the ids of the dialogue's messages, `decoded` the text of its output ids.
    """
    same = encoded == dialogue.prompt_ids
    first = next(
        (i for i, pair in enumerate(zip(encoded, dialogue.prompt_ids, strict=False)) if pair[0] != pair[1]),
        min(len(encoded), len(dialogue.prompt_ids)),
    )
    verdict.check(
        f"{dialogue.name}: prompt ids", same, "equal", "equal" if same else f"others from {first} on"
    )
    verdict.check(f"{dialogue.name}: text", decoded == dialogue.text, repr(dialogue.text), repr(decoded))


def gate_dialogue(verdict: Verdict, dialogue: Dialogue, chosen: np.ndarray) -> None:
    """`chosen` [n] is what the set put after each of `dialogue.fed_ids`."""
    name, gated = dialogue.name, dialogue.gated
    found = [int(chosen[dialogue.position_of(index)]) for index in gated]
    wanted = [dialogue.output_ids[index] for index in gated]
    wrong = [index for index in range(len(gated)) if found[index] != wanted[index]]
    detail = f"{len(gated) - len(wrong)}/{len(gated)}"
    if wrong:
        first = wrong[0]
        detail += (
            f", first at position {dialogue.position_of(gated[first])}: {found[first]} for {wanted[first]}"
        )
    verdict.check(f"{name}: tokens", bool(gated) and not wrong, f"{len(gated)}/{len(gated)}", detail)
    if dialogue.stops:
        last = int(chosen[-1])
        verdict.check(
            f"{name}: stop token", last == dialogue.output_ids[-1], str(dialogue.output_ids[-1]), str(last)
        )
    verdict.tokens[name] = found
