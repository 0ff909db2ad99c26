"""The reference of a weight recipe: the re-authored decoder in float32 torch with exactly the stored weights.

It separates two questions: how far a bundle is from the numbers it stores (compare with this, tight bounds), and how
far the stored numbers are from the checkpoint (compare this with the oracle).
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.recipe_model import RecipeModel, write_reference
from workflow_scripts.model.front_end_reference import exact_front_end
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights


@torch.no_grad()
def build_reference(checkpoint: Checkpoint, weights: Weights, oracle: Oracle, out: Path) -> None:
    """Run every dialogue with numbers in one pass; write `reference.json` and `measured.npz`.

    Arrays per dialogue, one row per fed position: embeds [n, hidden], ple [n, layers, ple_dim], hidden [n, hidden],
    logits [n, vocab], all float32; embeds and ple are exact (unquantized tables). And what passes between the layers,
    which serves any cut into chunks: residual.I [n, hidden], what layer I - 1 gives; key.I and value.I [n, kv_heads,
    head_dim] of every layer I that owns K/V.
    """
    model = RecipeModel.of(weights)
    arrays: dict[str, np.ndarray] = {}
    dialogues = oracle.with_numbers()
    for name in track([dialogue.name for dialogue in dialogues], "reference", len(dialogues)):
        ids = np.array(oracle.dialogues[name].fed_ids)
        embeds, per_layer = exact_front_end(checkpoint, ids)
        rows = _run(model, embeds, per_layer)
        rows |= {"embeds": embeds[0], "ple": per_layer[0], "logits": model.head(rows["hidden"])}
        arrays |= {f"{name}.{kind}": value.numpy() for kind, value in rows.items()}
    write_reference(out, dialogues, arrays, recipe=weights.recipe, checkpoint=checkpoint.digest)


def _run(model: RecipeModel, embeds: Tensor, per_layer: Tensor) -> dict[str, Tensor]:
    """The hidden rows, and what passes between the layers."""
    residuals: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: residuals.append(output[0]))
        for layer in model.decoder.layers
    ]
    hidden, current = model.one_pass(embeds, per_layer)
    for hook in hooks:
        hook.remove()
    rows = {"hidden": hidden[0]} | {f"residual.{number}": row for number, row in enumerate(residuals, 1)}
    for layer, pair in current.items():  # [1, kv_heads, n, head_dim]
        rows[f"key.{layer}"] = pair.key[0].transpose(0, 1)
        rows[f"value.{layer}"] = pair.value[0].transpose(0, 1)
    return rows
