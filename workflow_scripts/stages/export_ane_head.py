"""Stage: weights -> head for the Neural Engine (the token id).

Params: compute `fp32`|`fp16`.
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.ane_head import exported_head
from workflow_scripts.model.signature import COMPUTE_DTYPES, ane_head
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    spec = ane_head(weights.config, 0, compute)["main"]
    description = {
        "form": "ane_head",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", exported_head(weights, dtype), spec)], job.out, description)
