"""Stage: weights -> bundle of graph form `blend_core` (K/V written through a mask).

Params: compute `fp32`|`fp16`, context (columns of the caches).
"""

from workflow_scripts.coreai.core_bundle import save_core
from workflow_scripts.model.blend_core import BlendCore
from workflow_scripts.model.signature import blend_core
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights = Weights.open(job.inputs["weights"])
    compute, context = job.params["compute"], job.params["context"]
    specs = blend_core(weights.config, context, compute)
    save_core(weights, "blend_core", compute, specs, {"main": BlendCore}, job.out)
