"""Models for the tests of graph forms with states: a small random one for the runtime, torch modules as a program."""

from dataclasses import dataclass

import numpy as np
import torch

from tests import tiny
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.model.decoder import Decoder, causal_masks
from workflow_scripts.model.heads import LogitsHead
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.recipes import get_recipe
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.quantize.writer import write_weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables
from workflow_scripts.tables.writer import write_raw_tables

POSITIONS = 60  # more than seven windows of 8, for the embedded model and for the small one
CONTEXT, CACHE_MINIMUM, CAPACITIES = 64, 32, (24, 300)

# The fewest layers that have two sliding slots, a full one, and one that shares: export time is paid per layer.
SMALL = tiny.Dims(layer_types=(SLIDING, SLIDING, FULL, FULL), num_kv_shared_layers=1)


@dataclass(frozen=True)
class Model:
    """Weights and tables, and what the decoder that equals Hugging Face's computes of `ids` with them in one pass."""

    weights: Weights
    tables: RawTables
    ids: np.ndarray
    embeds: np.ndarray
    per_layer: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray

    def head(self, hidden):
        """Logits [n, V] of hidden states [n, H]."""
        return head_of(self.weights)(torch.from_numpy(hidden)).numpy()


def head_of(weights):
    lm_head = eager_linears(weights)(HEAD_WEIGHT)
    return LogitsHead(lm_head, weights.config.final_logit_softcapping, torch.float32)


@torch.no_grad()
def model(weights, tables):
    """Random token ids, and the reference's answer to them."""
    config = weights.config
    ids = np.random.default_rng(7).integers(0, config.vocab_size, POSITIONS)
    embeds = tables.embed(ids)
    per_layer = tables.per_layer_inputs(ids, embeds)
    decoder = Decoder(weights, eager_linears(weights), torch.float32).eval()
    hidden = decoder(
        torch.from_numpy(embeds)[None],
        torch.from_numpy(per_layer)[None],
        torch.arange(POSITIONS)[None],
        causal_masks(config, POSITIONS, torch.float32),
        {},
    ).hidden[0]
    logits = head_of(weights)(hidden).numpy()
    return Model(weights, tables, ids, embeds, per_layer, hidden.numpy(), logits)


def small_artifacts(root, recipe):
    """Folders `weights` and `tables` of the small model."""
    checkpoint = tiny.build_tiny(root, SMALL)
    folders = {"weights": root / "weights", "tables": root / "tables"}
    for folder in folders.values():
        folder.mkdir()
    write_weights(checkpoint, get_recipe(recipe), folders["weights"])
    write_raw_tables(checkpoint, folders["tables"])
    return folders


def export(stage, inputs, params, out):
    """Run an export stage into the new folder `out`."""
    out.mkdir()
    stage.run(Job(inputs, {}, params, out))


class TorchProgram:
    """The functions' torch modules behind the interface of a loaded bundle."""

    def __init__(self, modules, specs):
        self._modules, self._specs = modules, specs

    @property
    def functions(self):
        return sorted(self._modules)

    def spec(self, function):
        return self._specs[function]

    def place(self, array):
        return torch.from_numpy(array.copy())

    @torch.no_grad()
    def call(self, function, inputs, states):
        spec = self._specs[function]
        given = [torch.as_tensor(inputs[name]) for name in spec.inputs]
        output = self._modules[function](*given, *(states[name] for name in spec.states))
        (name,) = spec.outputs
        return {name: output.numpy()}


def described(spec):
    """Every tensor of a function in order, as a finished bundle tells it."""
    return [
        (side, name, tensor.dtype, tensor.described())
        for side in ("inputs", "outputs", "states")
        for name, tensor in getattr(spec, side).items()
    ]
