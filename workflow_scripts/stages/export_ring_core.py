"""Stage: weights -> bundle of graph form `ring_core` (sliding K/V in rings).

Its function `step` is the static twin of `main`.

Params: compute `fp32`|`fp16`, context (columns of the full layers' caches at most), cache_minimum (at least).
"""

from workflow_scripts.coreai.core_bundle import save_core
from workflow_scripts.model.core_step import CoreStep
from workflow_scripts.model.kv_state import RingColumn
from workflow_scripts.model.ring_core import RingCore
from workflow_scripts.model.signature import ring_core
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights = Weights.open(job.inputs["weights"])
    compute, context = job.params["compute"], job.params["context"]
    specs = ring_core(weights.config, context, compute, cache_minimum=job.params["cache_minimum"])
    column = RingColumn(weights.config.sliding_window, context)
    wraps = {
        "main": lambda decoder: RingCore(decoder, context),
        "step": lambda decoder: CoreStep(decoder, column),
    }
    save_core(weights, "ring_core", compute, specs, wraps, job.out)
