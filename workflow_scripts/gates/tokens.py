"""Gate `tokens` (and `long_run`): a packaged set of bundles repeats the oracle's answers id by id.

The oracle's own ids are fed back, so every gated position is judged on the right context, the stop token included;
a set that passes answers the same when it runs freely.
"""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from workflow_scripts.gates.oracle import LONG_RUN, Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict


def dialogues_of(verdict: Verdict, oracle: Oracle, long_run: bool) -> list[Dialogue]:
    """The dialogues of one of the two gates; that there is none is a failed check."""
    kind = "reaches" if long_run else "stays under"
    dialogues = [dialogue for dialogue in oracle.dialogues.values() if dialogue.is_long == long_run]
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


def cut_to_fit(verdict: Verdict, dialogues: list[Dialogue], context: int) -> list[Dialogue]:
    """The dialogues up to the last position of a set of bundles; the verdict says where it has fewer."""
    cut = [dialogue.cut(context) for dialogue in dialogues]
    for whole, part in zip(dialogues, cut, strict=True):
        if part is not whole:
            fed = f"{len(part.fed_ids)} of {len(whole.fed_ids)}"
            verdict.check(
                f"{whole.name}: positions fed", bool(part.gated), f"{fed}, all that this set has", fed
            )
    return cut


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


def gate_answers(
    verdict: Verdict,
    dialogue: Dialogue,
    found: Mapping[str, np.ndarray],
    stop_ids: Collection[int],
    decode: Callable[[list[int]], str],
) -> None:
    """What a set answered by itself (`NAME.answerI` of every turn, ids): the original's text, ended by a stop token.

    The last turn's ids are the original's, too; of earlier answers the oracle keeps the text alone.
    """
    for number, (question, expected) in enumerate(zip(dialogue.said, dialogue.answers, strict=True)):
        ids = found[f"{dialogue.name}.answer{number}"].tolist()
        text = decode([token for token in ids if token not in stop_ids])
        verdict.check(f"{dialogue.name}: {question}", text == expected, repr(expected), repr(text))
        stopped = ids[-1] in stop_ids
        verdict.check(f"{dialogue.name}: answer {number + 1} stops", stopped, "a stop token", str(ids[-1]))
        verdict.tokens[f"{dialogue.name}, answer {number + 1}"] = ids
    same = ids == dialogue.output_ids
    verdict.check(f"{dialogue.name}: ids", same, "the original's", "equal" if same else str(ids))


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
