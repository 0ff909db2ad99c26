"""Drive the bundles of a release folder as a host does, knowing nothing but the folder and its plan."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from workflow_scripts.coreai.host_cache import HostCache
from workflow_scripts.coreai.runtime import Bundle, open_bundle
from workflow_scripts.errors import UserError
from workflow_scripts.progress import track
from workflow_scripts.release.plan import Plan


class BundleSet(Protocol):
    """A loaded set of bundles with one conversation at a time."""

    def begin(self) -> None:
        """Start a new conversation."""

    def feed(self, token_id: int) -> int:
        """Take the next id and return the id that the model puts after it."""


class HostCacheSet:
    """Driver `hostcache`: front end -> core with the host's caches -> head, one position at a time."""

    def __init__(self, frontend: Bundle, core: Bundle, head: Bundle, sliding_window: int) -> None:
        self._frontend, self._core, self._head, self._window = frontend, core, head, sliding_window
        self.begin()

    def begin(self) -> None:
        """See `BundleSet`."""
        self._cache = HostCache(self._core.spec("main"), self._window)

    def feed(self, token_id: int) -> int:
        """See `BundleSet`; raises UserError past the context."""
        inputs = self._cache.inputs()
        ids = {"input_ids": np.array([[token_id]], np.int32)}
        front = self._frontend.call("gather_embeds", ids)
        front |= self._frontend.call("gather_per_layer", ids | front)
        outputs = self._core.call("main", inputs | front)
        self._cache.store(outputs)
        chosen = self._head.call("main", {"hidden": outputs["hidden"].astype(np.float32)})
        if "token_id" in chosen:
            return int(chosen["token_id"][0, 0])
        return int(
            chosen["logits"][0, 0].argmax()
        )  # numpy, like the argmax head, takes the lowest id of a tie


@contextmanager
def open_set(folder: Path) -> Iterator[BundleSet]:
    """Load a folder's bundles by its plan. Raises UserError for a driver this version does not know."""
    plan = Plan.open(folder)
    if plan.driver != "hostcache":
        raise UserError(
            f"{folder}: its plan wants the driver `{plan.driver}`, this version has `hostcache` only"
        )
    with ExitStack() as stack:
        bundles = {
            role: stack.enter_context(open_bundle(folder / name)) for role, name in plan.bundles.items()
        }
        columns = bundles["core"].spec("main").inputs["causal_mask_full"].shape[-1] - 1
        if columns != plan.context:
            raise UserError(
                f"{folder}: its plan says context {plan.context}, its core was exported for {columns}: fetch it again"
            )
        yield HostCacheSet(**bundles, sliding_window=plan.text["sliding_window"])


def follow(folder: str, dialogues: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Feed given ids, dialogue by dialogue (for `isolated`); returns what the set puts after each id [n]."""
    with open_set(Path(folder)) as bundles:
        chosen = {}
        for name, ids in dialogues.items():
            bundles.begin()
            chosen[name] = np.array([bundles.feed(token) for token in track(ids, name, len(ids))])
    return chosen


def answer(folder: str, prompt_ids: list[int], new_tokens: int, stop_ids: list[int]) -> dict[str, np.ndarray]:
    """Greedy answer (for `isolated`); `output` holds its ids, the stop id included where one was reached."""
    with open_set(Path(folder)) as bundles:
        for token in track(prompt_ids, "prompt position", len(prompt_ids)):
            following = bundles.feed(token)
        output = [following]
        while output[-1] not in stop_ids and len(output) < new_tokens:
            output.append(bundles.feed(output[-1]))
    return {"output": np.array(output)}
