"""Gate stage `structure` over one bundle for the Neural Engine.

Params: form `ane_chunk`|`ane_head`, compute, context; of a chunk layers. Inputs: bundle, checkpoint, weights.
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.chunk_weights import ane_head_constants, chunk_constants
from workflow_scripts.gates.structure import Claim, gate_structure
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.signature import signature
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("structure", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        gate_structure(verdict, job.inputs["bundle"], _claim(job))


def _claim(job: Job) -> Claim:
    """What the bundle must be, by the rule's parameters and the weights it was made from."""
    form, compute, context = (job.params[name] for name in ("form", "compute", "context"))
    checkpoint, weights = Checkpoint.open(job.inputs["checkpoint"]), Weights.open(job.inputs["weights"])
    said = {"form": form, "compute": compute, "checkpoint": checkpoint.digest, "recipe": weights.recipe}
    if form == "ane_head":
        interface = signature(form, checkpoint.config, context, compute)
        return Claim(interface, said, *ane_head_constants(weights, compute))
    first, last = job.params["layers"]
    interface = signature(form, checkpoint.config, context, compute, layers=(first, last))
    said |= {"layers": f"[{first}, {last})"}
    return Claim(interface, said, *chunk_constants(weights, (first, last), context, compute))
