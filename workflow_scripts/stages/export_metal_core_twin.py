"""Stage: weights -> host-cache core with the MLP from the kernels' twins, which run on any host.

No kernel is embedded, so no edit of one rebuilds it.
Inputs: weights (of the MLP), attention_weights (of all else).
Params: compute `fp32`|`fp16`, context (past columns of the caches).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.kernels import twin
from workflow_scripts.model.metal_core import core_description, metal_core
from workflow_scripts.model.signature import COMPUTE_DTYPES, hostcache_metal
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, attention = (Weights.open(job.inputs[name]) for name in ("weights", "attention_weights"))
    compute = job.params["compute"]
    spec = hostcache_metal(weights.config, job.params["context"], compute)["main"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    core = metal_core(weights, attention, twin.linears(weights), dtype)
    description = core_description(weights, attention, compute)
    save_bundle([Function("main", core, spec)], job.out, description)
