"""Stage: weights -> host-cache core bundle.

Params: form `hostcache_core`, compute `fp32`|`fp16`, context (past columns of the caches).
"""

from workflow_scripts.coreai.core_bundle import save_core
from workflow_scripts.model.hostcache import HostCacheCore
from workflow_scripts.model.signature import hostcache_core
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights = Weights.open(job.inputs["weights"])
    compute, context = job.params["compute"], job.params["context"]
    specs = hostcache_core(weights.config, context, compute)
    save_core(weights, "hostcache_core", compute, specs, {"main": HostCacheCore}, job.out)
