"""Gate `numbers` over cores whose kv_cache is a state: the hidden states, seen as logits, whatever calls they came by.

A state shows its faults only in the next call: so every dialogue is fed in several ways, and each must give what the
reference's one pass gives. Of a ring, some position must lie beyond twice the window: there every column has been
written twice. A window for which that takes longer than a long run is spared this.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates import bounds, state_runs
from workflow_scripts.gates.numbers import Evidence, compare, compare_choice, project
from workflow_scripts.gates.tokens import LONG_RUN
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT

_ONE_BY_ONE = "one by one"


def gate_state_core(
    verdict: Verdict,
    bundle: Path,
    evidence: Evidence,
    form: str,
    compute: str,
    context: int,
    cache_minimum: int | None = None,
) -> None:
    """Every dialogue with numbers, as far as the context goes, in every way that the form knows."""
    config, exact = evidence.weights.config, evidence.hidden()
    # The last position that blocks can take is the published bound, one below the context.
    counts = {name: min(len(rows), context - 1) for name, rows in exact.items()}
    said = {name: f"{counts[name]} of {len(exact[name])}" for name in counts}
    for name, text in said.items():
        verdict.check(f"{name}: positions compared", counts[name] > 0, "at least 1", text)
    if form == "ring_core":
        check_beyond_the_window(verdict, config, counts.values())
    if form == "blend_core":
        hidden = isolated(
            state_runs.run_blend_core,
            bundle=str(bundle),
            arrays=str(evidence.arrays),
            counts=counts,
            sliding_window=config.sliding_window,
            way=_ONE_BY_ONE,
        )
    else:
        ways = {name: ways_of(form, config, context, cache_minimum, count) for name, count in counts.items()}
        hidden = isolated(
            state_runs.run_state_core, bundle=str(bundle), arrays=str(evidence.arrays), ways=ways
        )
    logits, norm = project(evidence.weights.linear(HEAD_WEIGHT), hidden, config.final_logit_softcapping)
    for name, count in counts.items():
        bound = bounds.FP32_LOGITS
        if compute == "fp16":
            bound = bounds.logit_bound(bounds.core_error(config, count), exact[name][:count], norm)
        found = {label: rows for label, rows in logits.items() if label.startswith(f"{name}, ")}
        _compare_dialogue(verdict, evidence, name, found, bound)


def _compare_dialogue(
    verdict: Verdict, evidence: Evidence, name: str, found: Mapping[str, np.ndarray], bound: float
) -> None:
    """The logits of all ways, by `DIALOGUE, WAY`."""
    with np.load(evidence.arrays) as arrays:
        expected = arrays[f"{name}.logits"]
    for label, rows in found.items():
        wanted = expected[: len(rows)]
        compare(verdict, f"{label}: logits against the recipe's reference", rows, wanted, bound)
        dialogue = replace(evidence.oracle.dialogues[name], name=label)
        compare_choice(verdict, dialogue, rows.argmax(axis=1), wanted, bound)
        if evidence.weights.recipe == "fp32":
            oracle = evidence.oracle.logits(name)[: len(rows)]
            compare(verdict, f"{label}: logits against the oracle", rows, oracle, bound)


def check_beyond_the_window(verdict: Verdict, config: TextConfig, counts: Iterable[int]) -> None:
    """How many positions lie beyond twice the window, see the module."""
    window = config.sliding_window
    needed = 1 if 2 * window < LONG_RUN else 0
    beyond = max(0, max(counts, default=0) - 2 * window)
    verdict.at_least(f"positions beyond twice the window of {window}", beyond, needed)


def ways_of(
    form: str, config: TextConfig, context: int, cache_minimum: int, count: int
) -> dict[str, dict[str, Any]]:
    """By name the ways to feed `count` positions to a core, as `state_runs.run_state_core` takes them.

    Caches that `step` shares have `context` columns, others as few as they may have.
    """
    largest = context - 2 if form == "stateful_core" else min(config.sliding_window, context - 2)
    most = min(largest, count)
    third = min(largest, max(1, count // 3))
    main = {
        "in one pass" if form == "stateful_core" else "in whole windows": _blocks("main", count, [largest]),
        _ONE_BY_ONE: _blocks("main", count, [1]),
        # In a ring they end in the middle of a round, and go on around its end.
        "in mixed blocks": _blocks("main", count, [most // 2 + 1, 1, most - 1]),
    }
    steps = {
        "by function step": _blocks("step", count, [1]),
        "from main to step and back": [
            ["main", third],
            *_blocks("step", min(third, count - third), [1]),
            *_blocks("main", max(0, count - 2 * third), [third]),
        ],
    }
    few = max(cache_minimum, count)
    return {way: {"columns": few, "calls": calls} for way, calls in main.items()} | {
        way: {"columns": context, "calls": calls} for way, calls in steps.items()
    }


def _blocks(function: str, count: int, lengths: list[int]) -> list[list[Any]]:
    return [[function, length] for length in _lengths(count, [length for length in lengths if length > 0])]


def _lengths(count: int, lengths: list[int]) -> Iterator[int]:
    for length in cycle(lengths):
        if count <= 0:
            return
        yield min(length, count)
        count -= length
