"""Stage: weights -> bundle of graph form `stateful_core` (K/V in four states of any length).

Params: compute `fp32`|`fp16`, context (columns of the caches at most), cache_minimum (at least).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import COMPUTE_DTYPES, stateful_core
from workflow_scripts.model.stateful_core import StatefulCore
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
    spec = stateful_core(weights.config, context, compute, cache_minimum=job.params["cache_minimum"])["main"]
    decoder = Decoder(weights, exported_linears(weights, dtype), dtype)
    description = {
        "form": "stateful_core",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", StatefulCore(decoder), spec)], job.out, description)
