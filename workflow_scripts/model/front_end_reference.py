"""The exact front end in float32 torch, from the checkpoint's own tables: embeddings and per-layer inputs of token ids.

Source: HF transformers, models/gemma4/modeling_gemma4.py (get_per_layer_inputs, project_per_layer_inputs).
"""

import numpy as np
import torch
from torch import Tensor

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.model.norm import RMSNorm


def exact_front_end(checkpoint: Checkpoint, ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """ids [n] -> inputs_embeds [1, n, hidden] and per_layer_inputs [1, n, layers, ple_dim], float32."""
    config = checkpoint.config

    def rows(name: str, picked: slice | np.ndarray = slice(None)) -> Tensor:
        return torch.from_numpy(checkpoint.float32(name, picked))

    shape = (1, len(ids), config.num_hidden_layers, config.hidden_size_per_layer_input)
    embeds = rows("embed_tokens.weight", ids)[None] * config.hidden_size**0.5
    token = (
        rows("embed_tokens_per_layer.weight", ids).reshape(shape) * config.hidden_size_per_layer_input**0.5
    )
    context = embeds @ rows("per_layer_model_projection.weight").T * config.hidden_size**-0.5
    norm = RMSNorm(rows("per_layer_projection_norm.weight"), config.rms_norm_eps)
    return embeds, (norm(context.reshape(shape)) + token) * 2**-0.5
