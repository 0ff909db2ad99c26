"""A weight recipe's model in float32 torch, with exactly the stored weights, and the record of what it computes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from workflow_scripts.files import write_json
from workflow_scripts.gates.oracle import Dialogue
from workflow_scripts.model.decoder import Decoder, DecoderOutput, causal_masks
from workflow_scripts.model.heads import LogitsHead
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights


class RecipeModel:
    """The re-authored decoder and its head."""

    def __init__(self, decoder: Decoder, head: LogitsHead) -> None:
        self.decoder, self.head = decoder, head

    @classmethod
    def of(cls, weights: Weights) -> Self:
        """With the values of the stored codes."""
        linear = eager_linears(weights)
        decoder = Decoder(weights, linear, torch.float32).eval()
        head = LogitsHead(linear(HEAD_WEIGHT), weights.config.final_logit_softcapping, torch.float32)
        return cls(decoder, head)

    def one_pass(self, embeds: Tensor, per_layer: Tensor) -> DecoderOutput:
        """A whole conversation at once: embeds [1, n, hidden], per_layer [1, n, layers, ple_dim]."""
        count = embeds.shape[1]
        masks = causal_masks(self.decoder.config, count, torch.float32)
        with _told(self.decoder.layers):
            return self.decoder(embeds, per_layer, torch.arange(count)[None], masks, {})


@contextmanager
def _told(layers: nn.ModuleList) -> Iterator[None]:
    """Progress over the layers as they run, once each."""
    steps = track(range(1, len(layers) + 1), "layer", len(layers))

    def begin(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        next(steps)

    hooks = [layer.register_forward_pre_hook(begin) for layer in layers]
    try:
        yield
    finally:
        steps.close()
        for hook in hooks:
            hook.remove()


def write_reference(
    out: Path, dialogues: Sequence[Dialogue], arrays: Mapping[str, np.ndarray], **said: str
) -> None:
    """Write `measured.npz`, and `reference.json`, in which `said` tells what the numbers are of."""
    record = {"format": 1, **said, "dialogues": [dialogue.name for dialogue in dialogues]}
    write_json(out / "reference.json", record)
    with (out / "measured.npz").open("wb") as stream:
        np.savez(stream, **arrays)
