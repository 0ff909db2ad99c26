"""Stage: weights -> head in the Metal kernel `head_argmax_int8` (partial maxima for the host).

A stage of its own, so that an edit of another kernel does not rebuild it.
Params: compute `fp32`|`fp16`.
"""

from workflow_scripts.coreai.metal_head_bundle import save_metal_head
from workflow_scripts.kernels.head_argmax_int8 import KERNEL, head
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    save_metal_head(job.inputs["weights"], KERNEL, head, compute=job.params["compute"], out=job.out)
