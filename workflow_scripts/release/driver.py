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


class Conversation(Protocol):
    """One conversation with a set of bundles."""

    def feed(self, token_id: int) -> int:
        """Take the next id and return the id that the model puts after it."""


class HostCacheConversation:
    """Driver `hostcache`: front end -> core with the host's caches -> head, one position at a time."""

    def __init__(self, frontend: Bundle, core: Bundle, head: Bundle, sliding_window: int) -> None:
        self._frontend, self._core, self._head = frontend, core, head
        self._cache = HostCache(core.spec("main"), sliding_window)

    def feed(self, token_id: int) -> int:
        """See `Conversation`; raises UserError past the context."""
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
def open_conversation(folder: Path) -> Iterator[Conversation]:
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
        yield HostCacheConversation(**bundles, sliding_window=plan.text["sliding_window"])


def follow(folder: str, ids: list[int]) -> dict[str, np.ndarray]:
    """Feed given ids (for `isolated`); `chosen` [n] is what the set puts after each of them."""
    with open_conversation(Path(folder)) as conversation:
        chosen = [conversation.feed(token) for token in track(ids, "position", len(ids))]
    return {"chosen": np.array(chosen)}


def answer(folder: str, prompt_ids: list[int], new_tokens: int, stop_ids: list[int]) -> dict[str, np.ndarray]:
    """Greedy answer (for `isolated`); `output` holds its ids, the stop id included where one was reached."""
    output: list[int] = []
    with open_conversation(Path(folder)) as conversation:
        for token in track(prompt_ids, "prompt position", len(prompt_ids)):
            following = conversation.feed(token)
        output.append(following)
        while output[-1] not in stop_ids and len(output) < new_tokens:
            output.append(conversation.feed(output[-1]))
    return {"output": np.array(output)}
