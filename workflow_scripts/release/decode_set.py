"""Driver `decode`: a whole decoder whose kv_cache is a state, fed with token ids and the raw per-layer table."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from workflow_scripts.coreai.decode_host import DecodeHost, RingHost, token_rows, whole_table
from workflow_scripts.coreai.runtime import Bundle
from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec, ring_capacities, ring_function
from workflow_scripts.release.plan import Plan, check_context
from workflow_scripts.tables.dump import Tables


class Conversation(Protocol):
    """`DecodeHost` or `RingHost`: states of its own."""

    def step(self, token: int) -> np.ndarray:
        """Feed the next token id; logits [V] float32. Raises UserError past the context."""


class DecodeSet:
    """See `driver.BundleSet`."""

    def __init__(self, start: Callable[[], Conversation]) -> None:
        self.replaced: dict[str, int] = {}
        self._start = start
        self.begin()

    def begin(self) -> None:
        """See `driver.BundleSet`; new states, while the table stays where it is."""
        self._conversation = self._start()

    def feed(self, token_id: int) -> int:
        """See `driver.BundleSet`; raises UserError past the context."""
        logits = self._conversation.step(token_id)
        self.chosen_from = {"logits": logits}
        return int(logits.argmax())


def conversations(folder: Path, plan: Plan, decoder: Bundle, tables: Tables) -> Callable[[], Conversation]:
    """What starts a conversation with a loaded decoder, of whichever form; a whole table is placed once for all.

    Raises UserError where the plan does not fit the decoder. The bounds of a cache that grows are no part of a
    finished bundle: only the plan knows them.
    """
    capacities = ring_capacities(decoder.functions)
    if capacities:
        _check_shape(folder, plan, decoder.spec(ring_function(capacities[-1])))
        check_context(folder, plan, capacities[-1], "decoder was")
        table = whole_table(decoder, tables)
        return lambda: RingHost(decoder, table)
    spec = decoder.spec("main")
    _check_shape(folder, plan, spec)
    columns = plan.cache_minimum
    if columns is None:
        raise UserError(
            f"{folder}: its plan has no cache_minimum, but its decoder has a growing kv_cache: fetch it again"
        )
    inputs = (token_rows if "ple_tokens" in spec.inputs else whole_table)(decoder, tables)
    # The last column of such a cache is never filled.
    return lambda: DecodeHost(decoder, inputs, plan.context + 1, columns)


def _check_shape(folder: Path, plan: Plan, spec: FunctionSpec) -> None:
    """Vocabulary and kv_cache slots, for keys and for values, as the plan's `text` says."""
    slots = 2 * sum(len(layers) for layers in plan.text["slots"].values())
    said = {"ids": plan.text["vocab_size"], "slots": slots}
    logits = spec.outputs["logits"].shape[-1] if "logits" in spec.outputs else None
    found = {"ids": logits, "slots": sum(state.shape[0] for state in spec.states.values())}
    if found != said:
        raise UserError(
            f"{folder}: its plan says {_shape(said)}, its decoder has {_shape(found)}: fetch it again"
        )


def _shape(numbers: dict[str, int | None]) -> str:
    return f"{numbers['ids'] or 'no'} token ids and {numbers['slots']} kv_cache slots"
