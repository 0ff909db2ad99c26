"""The reference of a decoder in chunks: what passes between the layers of the float32 decoder in one graph.

It serves any cut into chunks: each can be fed what the layers before it give, and judged by what comes out.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.files import write_json
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.model.decoder import Decoder, causal_masks
from workflow_scripts.model.front_end_reference import exact_front_end
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.progress import track
from workflow_scripts.quantize.weights import Weights


@torch.no_grad()
def build_chunk_reference(checkpoint: Checkpoint, weights: Weights, oracle: Oracle, out: Path) -> None:
    """Run every dialogue with numbers in one pass; write `reference.json` and `measured.npz`.

    Arrays per dialogue, float32, one row per fed position: ple [n, layers, ple_dim]; residual.I [n, hidden], what
    layer I gets (residual.0 is the scaled embedding, the last one what the last layer gives); hidden [n, hidden], after
    the final norm; key.I and value.I [n, kv_heads, head_dim] of every layer I that owns K/V.
    """
    decoder = Decoder(weights, eager_linears(weights), torch.float32).eval()
    arrays: dict[str, np.ndarray] = {}
    names = [dialogue.name for dialogue in oracle.with_numbers()]
    for name in track(names, "reference between layers", len(names)):
        rows = _run(decoder, checkpoint, np.array(oracle.dialogues[name].fed_ids))
        arrays |= {f"{name}.{kind}": value.numpy() for kind, value in rows.items()}
    record = {
        "format": 1,
        "recipe": weights.recipe,
        "checkpoint": checkpoint.digest,
        "dialogues": names,
    }
    write_json(out / "reference.json", record)
    with (out / "measured.npz").open("wb") as stream:
        np.savez(stream, **arrays)


def _run(decoder: Decoder, checkpoint: Checkpoint, ids: np.ndarray) -> dict[str, Tensor]:
    embeds, per_layer = exact_front_end(checkpoint, ids)
    residuals = [embeds]
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: residuals.append(output))
        for layer in decoder.layers
    ]
    positions, masks = torch.arange(len(ids))[None], causal_masks(decoder.config, len(ids), torch.float32)
    hidden, current = decoder(embeds, per_layer, positions, masks, {})
    for hook in hooks:
        hook.remove()
    rows = {"ple": per_layer[0], "hidden": hidden[0]}
    rows |= {f"residual.{index}": residual[0] for index, residual in enumerate(residuals)}
    for layer, pair in current.items():  # [1, kv_heads, n, head_dim]
        rows |= {
            f"key.{layer}": pair.key[0].transpose(0, 1),
            f"value.{layer}": pair.value[0].transpose(0, 1),
        }
    return rows
