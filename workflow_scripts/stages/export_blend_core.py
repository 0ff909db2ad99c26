"""Stage: weights -> bundle of graph form `blend_core` (K/V written through a mask).

Params: compute `fp32`|`fp16`, context (columns of the caches).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.blend_core import BlendCore
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import COMPUTE_DTYPES, blend_core
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute, context = (
        Weights.open(job.inputs["weights"]),
        job.params["compute"],
        job.params["context"],
    )
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    spec = blend_core(weights.config, context, compute)["main"]
    decoder = Decoder(weights, exported_linears(weights, dtype), dtype)
    description = {
        "form": "blend_core",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", BlendCore(decoder), spec)], job.out, description)
