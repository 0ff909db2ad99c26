"""Stage: weights -> host-cache core bundle.

Params: form `hostcache_core`, compute `fp32`|`fp16`, context (past columns of the caches).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.hostcache import HostCacheCore
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import COMPUTE_DTYPES, hostcache_core
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    spec = hostcache_core(weights.config, job.params["context"], compute)["main"]
    core = HostCacheCore(Decoder(weights, exported_linears(weights, dtype), dtype))
    description = {
        "form": "hostcache_core",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", core, spec)], job.out, description)
