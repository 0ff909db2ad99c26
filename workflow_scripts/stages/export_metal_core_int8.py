"""Stage: weights -> host-cache core with the MLP in the Metal kernel `palette_matvec_int8`.

A stage of its own, so that an edit of another kernel does not rebuild it.
Params: compute `fp32`|`fp16`, context (past columns of the caches).
"""

from workflow_scripts.coreai.metal_core_bundle import save_metal_core
from workflow_scripts.kernels.palette_matvec_int8 import KERNEL, linears
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    context, compute = job.params["context"], job.params["compute"]
    save_metal_core(job.inputs["weights"], KERNEL, linears, context=context, compute=compute, out=job.out)
