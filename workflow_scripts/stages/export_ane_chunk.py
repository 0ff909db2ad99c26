"""Stage: weights -> one chunk of the decoder for the Neural Engine.

Params: compute `fp32`|`fp16`, context (past columns of the caches), layers [first, last).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.ane_chunk import AneChunk
from workflow_scripts.model.ane_conv import exported_convs
from workflow_scripts.model.signature import COMPUTE_DTYPES, ane_chunk
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    context, (first, last) = job.params["context"], job.params["layers"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    spec = ane_chunk(weights.config, context, compute, layers=(first, last))["main"]
    chunk = AneChunk(weights, exported_convs(weights, dtype), dtype, (first, last), context)
    description = {
        "form": "ane_chunk",
        "layers": f"[{first}, {last})",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", chunk, spec)], job.out, description)
