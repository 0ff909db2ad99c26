"""Stage: weights -> head from the kernel's twin, which runs on any host (partial maxima for the host).

No kernel is embedded, so no edit of one rebuilds it.
Params: compute `fp32`|`fp16`.
"""

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.kernels import twin
from workflow_scripts.model.metal_head import head_description
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import head_argmax_metal
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    spec = head_argmax_metal(weights.config, 0, compute)["main"]
    head = twin.head(weights, HEAD_WEIGHT)
    description = head_description(weights, compute)
    save_bundle([Function("main", head, spec)], job.out, description)
