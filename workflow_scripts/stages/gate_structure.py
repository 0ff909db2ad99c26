"""Gate stage `structure` over one bundle.

Params: form, compute, context. Inputs: bundle, checkpoint, and what it was made from: weights, or tables (front end).
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates import stored_weights
from workflow_scripts.gates.structure import Claim, gate_structure
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("structure", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        gate_structure(verdict, job.inputs["bundle"], _claim(job))


def _claim(job: Job) -> Claim:
    """What the bundle must be, by the rule's parameters and what it was made from."""
    form, compute = job.params["form"], job.params["compute"]
    checkpoint = Checkpoint.open(job.inputs["checkpoint"])
    interface = signature(form, checkpoint.config, job.params["context"], compute)
    said = {"form": form, "compute": compute, "checkpoint": checkpoint.digest}
    if form == "frontend":
        constants = stored_weights.frontend_constants(RawTables.open(job.inputs["tables"]))
        return Claim(interface, said | {"tables": "int8"}, constants)
    weights = Weights.open(job.inputs["weights"])
    held = stored_weights.bundle_constants(form, weights, compute)
    is_core = form in stored_weights.CORES
    known = stored_weights.rotary_constants(checkpoint.config) if is_core else frozenset()
    return Claim(interface, said | {"recipe": weights.recipe}, *held, known)
