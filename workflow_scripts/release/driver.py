"""Drive the bundles of a release folder as a host does, knowing nothing but the folder and its plan."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from coreai.runtime import SpecializationOptions

from workflow_scripts.coreai.chunk_bundles import open_chunks
from workflow_scripts.coreai.chunk_host import Call, ChunkHost
from workflow_scripts.coreai.expanded import expanded
from workflow_scripts.coreai.host_cache import HostCache
from workflow_scripts.coreai.pairing import refuse_other_tables
from workflow_scripts.coreai.runtime import Bundle, open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.kernels.partials import chosen_token
from workflow_scripts.progress import TERMINAL, track
from workflow_scripts.release.decode_set import DecodeSet, conversations
from workflow_scripts.release.language import check_functions
from workflow_scripts.release.names import AOT, CHUNKS_PLAN
from workflow_scripts.release.plan import Plan, check_context
from workflow_scripts.tables.dump import Tables
from workflow_scripts.tables.open import open_tables


class BundleSet(Protocol):
    """A loaded set of bundles with one conversation at a time.

    `replaced` counts, for each bundle by its name, the Metal kernels that run as their reference operators.
    `chosen_from` is what the last id was chosen from, float32: `hidden` [H] before a head, `logits` [V] of a decoder.
    """

    replaced: dict[str, int]
    chosen_from: dict[str, np.ndarray]

    def begin(self) -> None:
        """Start a new conversation."""

    def feed(self, token_id: int) -> int:
        """Take the next id and return the id that the model puts after it."""


class FrontEnd(Protocol):
    """Where a core's embeddings come from."""

    def embed(self, token_id: int) -> dict[str, np.ndarray]:
        """The core's inputs `inputs_embeds` [1, 1, H] and `per_layer_inputs` [1, 1, L, P] for one token."""


class BundleFrontEnd:
    """A front-end bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def embed(self, token_id: int) -> dict[str, np.ndarray]:
        """See `FrontEnd`."""
        ids = {"input_ids": np.array([[token_id]], np.int32)}
        embeds = self._bundle.call("gather_embeds", ids)
        return embeds | self._bundle.call("gather_per_layer", ids | embeds)


class TablesFrontEnd:
    """Raw tables in host memory, as an app maps them; computed in float32 and rounded once to what the core takes."""

    def __init__(self, tables: Tables, dtype: str) -> None:
        self._tables, self._dtype = tables, dtype

    def embed(self, token_id: int) -> dict[str, np.ndarray]:
        """See `FrontEnd`."""
        ids = np.array([token_id])
        embeds = self._tables.embed(ids)
        values = {"inputs_embeds": embeds, "per_layer_inputs": self._tables.per_layer_inputs(ids, embeds)}
        return {name: value[None].astype(self._dtype) for name, value in values.items()}


class HostCacheSet:
    """Driver `hostcache`: front end -> core with the host's caches -> head, one position at a time."""

    def __init__(
        self, frontend: FrontEnd, core: Bundle, head: Bundle, sliding_window: int, replaced: dict[str, int]
    ) -> None:
        self.replaced = replaced
        self._frontend, self._core, self._head, self._window = frontend, core, head, sliding_window
        self._head_dtype = head.spec("main").inputs["hidden"].dtype
        self.begin()

    def begin(self) -> None:
        """See `BundleSet`."""
        self._cache = HostCache(self._core.spec("main"), self._window)

    def feed(self, token_id: int) -> int:
        """See `BundleSet`; raises UserError past the context."""
        inputs = self._cache.inputs()
        outputs = self._core.call("main", inputs | self._frontend.embed(token_id))
        self._cache.store(outputs)
        self.chosen_from = {"hidden": outputs["hidden"][0, 0].astype(np.float32)}
        return chosen_id(self._head.call("main", {"hidden": outputs["hidden"].astype(self._head_dtype)}))


class ChunkSet:
    """Driver `chunks`: front end -> chunk after chunk with the host's caches -> head, one position at a time."""

    def __init__(self, frontend: FrontEnd, plan: Mapping[str, Any], call: Call, head: Bundle) -> None:
        self.replaced: dict[str, int] = {}
        self._frontend, self._plan, self._call, self._head = frontend, plan, call, head
        self._head_dtype = head.spec("main").inputs["hidden"].dtype
        self.begin()

    def begin(self) -> None:
        """See `BundleSet`."""
        self._host = ChunkHost(self._plan, self._call)

    def feed(self, token_id: int) -> int:
        """See `BundleSet`; raises UserError past the context."""
        front = self._frontend.embed(token_id)
        hidden = self._host.step(front["inputs_embeds"], front["per_layer_inputs"])
        self.chosen_from = {"hidden": hidden[0, 0].astype(np.float32)}
        return chosen_id(self._head.call("main", {"hidden": hidden.astype(self._head_dtype)}))


def chosen_id(head: Mapping[str, np.ndarray]) -> int:
    """The id that a head's outputs choose, whichever of the three kinds it is; of a tie always the lowest."""
    if "token_id" in head:
        return int(head["token_id"][0, 0])
    if "partial_values" in head:
        return chosen_token(head["partial_values"], head["partial_indices"])
    return int(head["logits"][0, 0].argmax())


@contextmanager
def open_set(folder: Path, options: SpecializationOptions | None = None) -> Iterator[BundleSet]:
    """Load a folder's bundles by its plan; `options` as for `open_bundle`.

    Raises UserError for a driver this version does not know, and for tables that the bundles were not made for.
    """
    plan = Plan.open(folder)
    if plan.driver not in _OPENERS:
        known = ", ".join(_OPENERS)
        raise UserError(f"{folder}: its plan wants the driver `{plan.driver}`, this version has {known} only")
    _refuse_compiled(plan)
    for name in plan.tables:
        tables = open_tables(folder / name)
        for bundle in plan.bundles.values():
            refuse_other_tables(folder / bundle, tables)
    with _OPENERS[plan.driver](folder, plan, options) as bundles:
        yield bundles


def _refuse_compiled(plan: Plan) -> None:
    """Raise UserError where a bundle was compiled ahead of time, which no runtime of Python loads."""
    for name in plan.bundles.values():
        if name.endswith(".aimodelc"):
            raise UserError(
                f"{name} is compiled for devices of one architecture, see {AOT} beside it: on this host take the "
                "folder with the .aimodel"
            )


@contextmanager
def _open_host_cache(
    folder: Path, plan: Plan, options: SpecializationOptions | None
) -> Iterator[HostCacheSet]:
    with _open_bundles(folder, plan.bundles, options) as bundles:
        core, head = bundles["core"], bundles["head"]
        inputs = core.spec("main").inputs
        check_context(folder, plan, inputs["causal_mask_full"].shape[-1] - 1, "core was")
        frontend = _front_end(folder, plan, bundles, inputs["inputs_embeds"].dtype)
        yield HostCacheSet(frontend, core, head, plan.text["sliding_window"], _replaced(plan, bundles))


@contextmanager
def _open_chunk_set(folder: Path, plan: Plan, options: SpecializationOptions | None) -> Iterator[ChunkSet]:
    """The chunks by the plan of their own."""
    beside = {role: name for role, name in plan.bundles.items() if role in ("frontend", "head")}
    with (
        open_chunks(folder / CHUNKS_PLAN, options) as (chunks, call),
        _open_bundles(folder, beside, options) as bundles,
    ):
        check_context(folder, plan, chunks["context"], "chunks were")
        yield ChunkSet(_front_end(folder, plan, bundles, "float32"), chunks, call, bundles["head"])


@contextmanager
def _open_decode(folder: Path, plan: Plan, options: SpecializationOptions | None) -> Iterator[DecodeSet]:
    with (
        expanded(folder / plan.bundles["decoder"]) as bundle,
        open_bundle(bundle, options) as decoder,
    ):
        check_functions(folder, decoder.functions)
        yield DecodeSet(conversations(folder, plan, decoder, _tables(folder, plan)))


_Opener = Callable[[Path, Plan, SpecializationOptions | None], AbstractContextManager[BundleSet]]
_OPENERS: dict[str, _Opener] = {
    "hostcache": _open_host_cache,
    "chunks": _open_chunk_set,
    "decode": _open_decode,
}


@contextmanager
def _open_bundles(
    folder: Path, names: Mapping[str, str], options: SpecializationOptions | None
) -> Iterator[dict[str, Bundle]]:
    """Role -> loaded bundle."""
    with ExitStack() as stack:
        yield {role: stack.enter_context(open_bundle(folder / name, options)) for role, name in names.items()}


def _replaced(plan: Plan, bundles: Mapping[str, Bundle]) -> dict[str, int]:
    return {plan.bundles[role]: bundle.kernels for role, bundle in bundles.items() if bundle.kernels}


def _front_end(folder: Path, plan: Plan, bundles: Mapping[str, Bundle], dtype: str) -> FrontEnd:
    """The set's own front end, else the plan's tables, with embeddings in `dtype`."""
    if "frontend" in bundles:
        return BundleFrontEnd(bundles["frontend"])
    return TablesFrontEnd(_tables(folder, plan), dtype)


def _tables(folder: Path, plan: Plan) -> Tables:
    """The first tables that the plan names."""
    if not plan.tables:
        raise UserError(f"{folder}: its plan has neither a front end nor tables: fetch it again")
    return open_tables(folder / plan.tables[0])


def follow(folder: str, dialogues: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Feed given ids, dialogue by dialogue (for `isolated`); returns what the set puts after each id [n]."""
    with open_set(Path(folder)) as bundles:
        return follow_in(bundles, dialogues)


def follow_in(bundles: BundleSet, dialogues: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    """The same with a set that is loaded."""
    chosen = {}
    for name, ids in dialogues.items():
        bundles.begin()
        chosen[name] = np.array([bundles.feed(token) for token in track(ids, name, len(ids))])
    return chosen


def watch(folder: str, dialogues: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """As `follow`, with what ids were chosen from: `NAME.ids` [n], and `NAME.hidden` [n, H] or `NAME.logits` [n, V]."""
    seen: dict[str, list[Any]] = {}
    with open_set(Path(folder)) as bundles:
        for name, ids in dialogues.items():
            bundles.begin()
            for token in track(ids, name, len(ids)):
                row = {"ids": bundles.feed(token), **bundles.chosen_from}
                for kind, value in row.items():
                    seen.setdefault(f"{name}.{kind}", []).append(value)
    return {name: np.array(rows) for name, rows in seen.items()}


class Conversation:
    """Greedy answers in one conversation with a set; what a turn repeats of the conversation is not fed again."""

    def __init__(self, bundles: BundleSet, stop_ids: Collection[int]) -> None:
        self._bundles, self._stop_ids = bundles, stop_ids
        self._fed: list[int] = []

    def answer(self, prompt_ids: list[int], new_tokens: int) -> list[int]:
        """The ids after a prompt, which holds all turns so far; the stop id included where one was reached."""
        if not self._fed or prompt_ids[: len(self._fed)] != self._fed:
            self._bundles.begin()
            self._fed = []
        prompt = prompt_ids[len(self._fed) :]
        for token in track(prompt, "prompt position", len(prompt)):
            following = self._feed(token)
        output = [following]
        while output[-1] not in self._stop_ids and len(output) < new_tokens:
            output.append(self._feed(output[-1]))
        return output

    def _feed(self, token: int) -> int:
        self._fed.append(token)
        return self._bundles.feed(token)


def say_replaced(bundles: BundleSet) -> None:
    """Tell the terminal which bundles run without their kernels."""
    for name, count in bundles.replaced.items():
        kernels = "Metal kernel runs as its" if count == 1 else "Metal kernels run as their"
        TERMINAL.info("%s: %d %s reference operators: this host has no Metal", name, count, kernels)
