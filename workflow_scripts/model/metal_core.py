"""Graph form `hostcache_metal`: the host-cache core whose MLP matrices are layers of another kind.

The MLP holds four fifths of a core's weights, so it alone runs in Metal kernels; the matrices of attention and
per-layer embedding stay ordinary graph operators, from weights of their own: palettes on a Mac, float16 on a phone.
"""

import torch
from torch import nn

from workflow_scripts.errors import UserError
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.hostcache import HostCacheCore
from workflow_scripts.model.linear import LinearFactory, exported_linears
from workflow_scripts.quantize.weights import Weights


def metal_core(
    weights: Weights, attention_weights: Weights, mlp: LinearFactory, dtype: torch.dtype
) -> HostCacheCore:
    """The core with `mlp` building its gate, up and down projections from `weights`; all else is `attention_weights`.

    Raises UserError where the two were made from different checkpoints.
    """
    if weights.checkpoint_digest != attention_weights.checkpoint_digest:
        raise UserError(
            f"weights {weights.recipe} and attention weights {attention_weights.recipe} were made from different "
            "checkpoints: build both from one"
        )
    rest = exported_linears(attention_weights, dtype)

    def build(name: str) -> nn.Module:
        return mlp(name) if ".mlp." in name else rest(name)

    return HostCacheCore(Decoder(attention_weights, build, dtype))


def core_description(weights: Weights, attention_weights: Weights, compute: str) -> dict[str, str]:
    """What the bundle says about itself."""
    return {
        "form": "hostcache_metal",
        "recipe": weights.recipe,
        "attention_recipe": attention_weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
