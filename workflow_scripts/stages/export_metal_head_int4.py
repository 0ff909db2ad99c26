"""Stage: weights -> head in the Metal kernel `head_argmax_int4` (partial maxima for the host).

A stage of its own, so that an edit of another kernel does not rebuild it.
Params: compute `fp32`|`fp16`.
"""

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.kernels import head_argmax_int4
from workflow_scripts.model.metal_head import head_description
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import head_argmax_metal
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    spec = head_argmax_metal(weights.config, 0, compute)["main"]
    head = head_argmax_int4.head(weights, HEAD_WEIGHT)
    description = head_description(weights, compute)
    save_bundle([Function("main", head, spec)], job.out, description, [head_argmax_int4.KERNEL])
