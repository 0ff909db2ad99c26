"""Stage: weights -> bundle of graph form `stateful_core` (K/V in four states of any length).

Its function `step` is the static twin of `main`.

Params: compute `fp32`|`fp16`, context (columns of the caches at most), cache_minimum (at least).
"""

from workflow_scripts.coreai.core_bundle import save_core
from workflow_scripts.model.core_step import CoreStep
from workflow_scripts.model.kv_state import LongColumn
from workflow_scripts.model.signature import stateful_core
from workflow_scripts.model.stateful_core import StatefulCore
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights = Weights.open(job.inputs["weights"])
    compute, context = job.params["compute"], job.params["context"]
    specs = stateful_core(weights.config, context, compute, cache_minimum=job.params["cache_minimum"])
    column = LongColumn(weights.config.sliding_window, context)
    wraps = {"main": StatefulCore, "step": lambda decoder: CoreStep(decoder, column)}
    save_core(weights, "stateful_core", compute, specs, wraps, job.out)
