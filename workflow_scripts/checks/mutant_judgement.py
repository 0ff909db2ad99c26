"""What became of a mutant, judged from what failed in its run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workflow_scripts.checks.mutant_catalogue.mutant import Mutant

CAUGHT, SURVIVED = "caught", "SURVIVED"
OTHER_GATE, OTHER_REASON, NOT_ALONE = "by another", "for another reason", "not alone"
BROKEN = "broken"


@dataclass(frozen=True)
class Failure:
    """Who failed, over what, and the reason it gave. `by` is as `Mutant.caught_by`."""

    by: str
    target: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """One mutant's run. `crashes` are internal errors: the fault is no fault of a model, but of a program.

    `refusal` is why, with the mutant's gate taken out of the required ones, the release was not made or not verified.
    """

    mutant: str
    seconds: float
    failures: tuple[Failure, ...]
    crashes: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class Judgement:
    """One of the words above, and what is to be told beside it."""

    word: str
    told: str


def judge(mutant: Mutant, outcome: Outcome) -> Judgement:
    """Caught is a mutant whose gate failed, over its target, for its reason, and where it says so alone."""
    if outcome.crashes:
        return Judgement(BROKEN, outcome.crashes[0])
    if not outcome.failures:
        return Judgement(SURVIVED, "nothing failed")
    named = [f for f in outcome.failures if (f.by, f.target) == (mutant.caught_by, mutant.target)]
    others = sorted({f.by for f in outcome.failures} - {mutant.caught_by})
    if not named:
        return Judgement(OTHER_GATE, "; ".join(f"{f.by} on {f.target}: {f.reason}" for f in outcome.failures))
    if not any(mutant.check in failure.reason for failure in named):
        return Judgement(OTHER_REASON, named[0].reason)
    if mutant.alone and others:
        return Judgement(NOT_ALONE, f"{', '.join(others)} failed, too")
    if mutant.alone and outcome.refusal:
        return Judgement(NOT_ALONE, f"the release is refused without this gate, too: {outcome.refusal}")
    return Judgement(CAUGHT, named[0].reason)


def only_catchers(
    mutants: Iterable[Mutant], judgements: Mapping[str, Judgement], gates: Sequence[str]
) -> dict[str, list[str]]:
    """Gate -> the mutants that would ship without it."""
    alone = [m for m in mutants if m.alone and judgements[m.name].word == CAUGHT]
    return {gate: [mutant.name for mutant in alone if mutant.caught_by == gate] for gate in gates}
