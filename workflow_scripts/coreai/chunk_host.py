"""The host of a decoder in chunks, in numpy: it knows nothing but the plan's JSON (`model/chunks.py` explains it).

The same few lines stand in an app's engine.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workflow_scripts.errors import UserError

Arrays = dict[str, np.ndarray]
Call = Callable[[int, Arrays], Mapping[str, np.ndarray]]
"""Runs chunk number i on its inputs by name; gives its outputs by name."""


class ChunkHost:
    """One conversation: the caches, the position, and what goes from chunk to chunk."""

    def __init__(self, plan: Mapping[str, Any], call: Call) -> None:
        self.plan, self.position = plan, 0
        self.caches = {
            name: np.zeros(tensor["shape"], tensor["dtype"]) for name, tensor in plan["caches"].items()
        }
        self._call = call

    def step(self, inputs_embeds: np.ndarray, per_layer_inputs: np.ndarray) -> np.ndarray:
        """Run a position: inputs_embeds [1, 1, hidden] and per_layer_inputs [1, 1, layers, ple_dim] -> hidden.

        Raises UserError past the last column.
        """
        if self.position >= self.plan["context"]:
            raise UserError(
                f"the conversation is longer than the {self.plan['context']} positions these chunks were exported for: "
                "start a new one, or export with a larger context"
            )
        made: list[Mapping[str, np.ndarray]] = []
        for number, chunk in enumerate(self.plan["chunks"]):
            inputs = {
                name: self._given(tensor, inputs_embeds, per_layer_inputs, made)
                for name, tensor in chunk["inputs"].items()
            }
            made.append(self._call(number, inputs))
        self._store(made)
        self.position += 1
        return made[-1]["hidden"]

    def _given(
        self,
        tensor: Mapping[str, Any],
        inputs_embeds: np.ndarray,
        per_layer_inputs: np.ndarray,
        made: list[Mapping[str, np.ndarray]],
    ) -> np.ndarray:
        """An input by its source, in its dtype; `made` has the outputs of the chunks that have run."""
        source, dtype = tensor["source"], tensor["dtype"]
        match source["kind"]:
            case "inputs_embeds":
                return inputs_embeds.astype(dtype)
            case "per_layer_inputs":
                return per_layer_inputs[:, :, slice(*source["layers"])].astype(dtype)
            case "hidden":
                return made[source["chunk"]]["hidden"].astype(dtype)
            case "position":
                return np.full(tensor["shape"], self.position, dtype)
            case "mask":
                return self._mask(tensor)
            case "cache":
                return self.caches[source["cache"]][source["slots"]]
            case "producer":
                past = self.caches[source["cache"]][source["slot"]]
                current = made[source["chunk"]][source["output"]][source["index"]]
                return np.concatenate([past, current.astype(dtype)], 2)
            case kind:
                raise UserError(f"the chunks' plan has a source `{kind}`, which this version does not know")

    def _mask(self, tensor: Mapping[str, Any]) -> np.ndarray:
        """0 for past columns that are seen and for the current one, which stands behind all of them."""
        window, context = tensor["source"]["window"], self.plan["context"]
        first = 0 if window is None else max(0, self.position - window + 1)
        mask = np.full(tensor["shape"], self.plan["masked"], tensor["dtype"])
        mask[..., first : self.position] = 0
        mask[..., context] = 0
        return mask

    def _store(self, made: list[Mapping[str, np.ndarray]]) -> None:
        """Write the current K/V of all chunks into the column of the position."""
        for chunk, outputs in zip(self.plan["chunks"], made, strict=True):
            for name, tensor in chunk["outputs"].items():
                target = tensor["target"]
                if target["kind"] == "cache":
                    current = outputs[name][..., 0, :]
                    self.caches[target["cache"]][target["slots"], ..., self.position, :] = current
