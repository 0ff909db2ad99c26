"""Stage: weights -> head for the Neural Engine (the token id).

Params: compute `fp32`|`fp16`.
"""

from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.ane_head import exported_head
from workflow_scripts.model.signature import ane_head
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    spec = ane_head(weights.config, 0, compute)["main"]
    head = exported_head(weights, torch_dtype(compute))
    save_weights_bundle([Function("main", head, spec)], weights, "ane_head", compute, job.out)
