"""The reference of a token decoder: the recipe's model in float32 torch, fed by the raw tables that the bundle holds.

As `make_reference`, but the embeddings and per-layer inputs are those of the quantized tables, not the checkpoint's.
"""

from pathlib import Path

import numpy as np
import torch

from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.recipe_model import RecipeModel, write_reference
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.dump import Tables


@torch.no_grad()
def build_decode_reference(weights: Weights, tables: Tables, oracle: Oracle, out: Path) -> None:
    """Run every dialogue with numbers in one pass; write `reference.json` and `measured.npz`.

    Arrays per dialogue, one row per fed position, float32: hidden [n, hidden], logits [n, vocab]. Raises UserError
    where weights and tables are of two checkpoints.
    """
    tables.refuse_weights_of_another(weights.checkpoint_digest)
    model = RecipeModel.of(weights)
    arrays: dict[str, np.ndarray] = {}
    dialogues = oracle.with_numbers()
    for dialogue in track(dialogues, "decode reference", len(dialogues)):
        ids = np.array(dialogue.fed_ids)
        embeds = tables.embed(ids)
        per_layer = tables.per_layer_inputs(ids, embeds)
        hidden = model.one_pass(torch.from_numpy(embeds)[None], torch.from_numpy(per_layer)[None]).hidden[0]
        arrays[f"{dialogue.name}.hidden"] = hidden.numpy()
        arrays[f"{dialogue.name}.logits"] = model.head(hidden).numpy()
    write_reference(
        out,
        dialogues,
        arrays,
        recipe=weights.recipe,
        checkpoint=weights.checkpoint_digest,
        tables=tables.FORMAT,
    )
