"""Gate stage `numbers` over one chunk for the Neural Engine.

Params: compute, context, layers. Inputs: bundle, oracle, weights with their reference.
"""

from workflow_scripts.gates.chunks import ChunkEvidence, gate_chunk, plan_around
from workflow_scripts.gates.numbers import Evidence, check_evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("numbers", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    recipe = Evidence.open(job.inputs)
    if not check_evidence(verdict, recipe):
        return
    plan, number = plan_around(recipe.weights.config, job.params["layers"], job.params["context"])
    gate_chunk(verdict, job.inputs["bundle"], ChunkEvidence(plan, recipe), number, job.params["compute"])
