"""Stage: weights -> bundle of graph form `ring_core` (sliding K/V in rings).

Params: compute `fp32`|`fp16`, context (columns of the full layers' caches at most), cache_minimum (at least).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.ring_core import RingCore
from workflow_scripts.model.signature import COMPUTE_DTYPES, ring_core
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
    spec = ring_core(weights.config, context, compute, cache_minimum=job.params["cache_minimum"])["main"]
    decoder = Decoder(weights, exported_linears(weights, dtype), dtype)
    description = {
        "form": "ring_core",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", RingCore(decoder, context), spec)], job.out, description)
