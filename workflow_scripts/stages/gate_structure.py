"""Gate stage `structure` over one bundle.

Params: form, compute, context. Inputs: bundle, checkpoint, and what it was made from: weights, or tables (front end).
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates import stored_weights
from workflow_scripts.gates.structure import gate_structure
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    form, compute, bundle = job.params["form"], job.params["compute"], job.inputs["bundle"]
    if form == "frontend":
        constants = stored_weights.frontend_constants(RawTables.open(job.inputs["tables"]))
    else:
        weights = Weights.open(job.inputs["weights"])
        stored = stored_weights.core_constants if form == "hostcache_core" else stored_weights.head_constants
        constants = stored(weights, compute)
    config = Checkpoint.open(job.inputs["checkpoint"]).config
    verdict = Verdict("structure", bundle.name)
    gate_structure(verdict, bundle, signature(form, config, job.params["context"], compute), constants)
    verdict.conclude(job.out)
