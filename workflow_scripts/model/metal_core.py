"""Graph form `hostcache_metal`: the host-cache core whose MLP matrices are layers of another kind.

The MLP holds four fifths of a core's weights, so it alone runs in Metal kernels; the matrices of attention and
per-layer embedding stay ordinary graph operators: as the recipe stores them, palettes on a Mac, float16 on a phone.
"""

import torch
from torch import nn

from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.hostcache import HostCacheCore
from workflow_scripts.model.linear import LinearFactory, exported_linears
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch


def metal_core(weights: Weights, mlp: LinearFactory, dtype: torch.dtype, scratch: Scratch) -> HostCacheCore:
    """The core with `mlp` building its gate, up and down projections; all else as in `hostcache_core`."""
    rest = exported_linears(weights, dtype, scratch)

    def build(name: str) -> nn.Module:
        return mlp(name) if ".mlp." in name else rest(name)

    return HostCacheCore(Decoder(weights, build, dtype))
