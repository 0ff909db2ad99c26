"""Gate stage `structure` over one bundle whose kv_cache is a state.

Params: form, compute, context; cache_minimum of a kv_cache that grows, capacities of `decode_ring`. Inputs: bundle,
checkpoint, weights; of a token decoder the tables that it was made with.
"""

from typing import Any

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.state_constants import decoder_constants, state_core_constants
from workflow_scripts.gates.stored_weights import rotary_constants
from workflow_scripts.gates.structure import Claim, gate_structure
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.open import open_tables

_GROWS = "main"  # in the forms that have a function with caches of any length


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("structure", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        gate_structure(verdict, job.inputs["bundle"], _claim(job))


def _claim(job: Job) -> Claim:
    """What the bundle must be, by the rule's parameters and what it was made from."""
    form, compute, context = (job.params[name] for name in ("form", "compute", "context"))
    checkpoint, weights = Checkpoint.open(job.inputs["checkpoint"]), Weights.open(job.inputs["weights"])
    said = {"form": form, "compute": compute, "checkpoint": checkpoint.digest, "recipe": weights.recipe}
    options: dict[str, Any] = {
        name: job.params[name] for name in ("cache_minimum", "capacities") if name in job.params
    }
    if "tables" in job.inputs:
        tables = open_tables(job.inputs["tables"])
        said["tables"] = options["tables"] = tables.FORMAT
        held = decoder_constants(weights, tables, job.params.get("capacities", ()), compute)
    else:
        held = state_core_constants(form, weights, context, compute)
    interface = signature(form, checkpoint.config, context, compute, **options)
    grows = {_GROWS} if "cache_minimum" in options else set()
    known = rotary_constants(checkpoint.config)
    return Claim(interface, said, *held, known, static=interface.keys() - grows)
