"""The host's side of a `hostcache_core`: the kv_cache, the masks and the position, in numpy.

The same few lines stand in an app's engine. Column layout: the graph sees `context` past columns and, behind
them, the current position as the last mask column. Full layers see past columns 0..p-1; sliding layers the last
W-1 of them, since the window of W keys includes the own one.
"""

from collections.abc import Mapping

import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec

MASKED = -1e4  # finite in float16; the lowest float16 would turn fully masked rows into NaN
CACHES = ("sliding_k", "sliding_v", "full_k", "full_v")


class HostCache:
    """Caches of one conversation, shaped as the core's own inputs say."""

    def __init__(self, core: FunctionSpec, sliding_window: int) -> None:
        self.context = core.inputs["causal_mask_full"].shape[-1] - 1
        self.position = 0
        self._window = sliding_window
        self._mask = core.inputs["causal_mask_full"]
        self._caches = {name: np.zeros(core.inputs[name].shape, core.inputs[name].dtype) for name in CACHES}

    def inputs(self) -> dict[str, np.ndarray]:
        """The core's inputs for the current position, but for the embeddings.

        Raises UserError past the last column.
        """
        if self.position >= self.context:
            raise UserError(
                f"the conversation is longer than the {self.context} positions this core was exported for: "
                "start a new one, or export with a larger context"
            )
        return {
            "position_ids": np.array([[self.position]], np.int32),
            "causal_mask_full": self._visible(0),
            "causal_mask_sliding": self._visible(max(0, self.position - self._window + 1)),
            **self._caches,
        }

    def store(self, outputs: Mapping[str, np.ndarray]) -> None:
        """Write the current K/V into its column and go on to the next position."""
        for name, cache in self._caches.items():
            cache[:, :, :, self.position] = outputs[f"{name}_cur"][:, :, :, 0]
        self.position += 1

    def _visible(self, first: int) -> np.ndarray:
        """Additive mask: past columns first..position-1 and the current one."""
        mask = np.full(self._mask.shape, MASKED, self._mask.dtype)
        mask[..., first : self.position] = 0
        mask[..., self.context] = 0
        return mask
