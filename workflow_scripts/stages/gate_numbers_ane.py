"""Gate stage `numbers` over one chunk for the Neural Engine.

Params: compute, context, layers. Inputs: bundle, oracle, weights with their reference.
"""

from workflow_scripts.gates.chunks import ChunkEvidence, gate_chunk, plan_around
from workflow_scripts.gates.numbers import Evidence, check_evidence
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("numbers", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle, weights = Oracle.open(job.inputs["oracle"]), Weights.open(job.inputs["weights"])
    if not check_evidence(verdict, Evidence(oracle, weights, job.inputs["reference"])):
        return
    plan, number = plan_around(weights.config, job.params["layers"], job.params["context"])
    names = [dialogue.name for dialogue in oracle.with_numbers()]
    evidence = ChunkEvidence(plan, weights, job.inputs["reference"], names)
    gate_chunk(verdict, job.inputs["bundle"], evidence, number, job.params["compute"])
