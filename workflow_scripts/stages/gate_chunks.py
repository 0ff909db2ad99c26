"""Gate stage `chunks` over one packaged folder with driver `chunks`.

Params: bundles (published names of the chunks in order), layers (their ranges), compute, context. Inputs: folder,
oracle, weights of the chunks with their reference.
"""

from workflow_scripts.coreai.chunk_bundles import read_plan
from workflow_scripts.gates.chunks import ChunkEvidence, gate_chain, gate_plan
from workflow_scripts.gates.numbers import Evidence, check_evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.chunks import chunk_plan, plan_json
from workflow_scripts.release.names import CHUNKS_PLAN
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("chunks", job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    recipe = Evidence.open(job.inputs)
    if not check_evidence(verdict, recipe):
        return
    path, compute = job.inputs["folder"] / CHUNKS_PLAN, job.params["compute"]
    plan = chunk_plan(recipe.weights.config, job.params["layers"], job.params["context"])
    gate_plan(verdict, read_plan(path), plan_json(plan, compute, job.params["bundles"]))
    gate_chain(verdict, path, ChunkEvidence(plan, recipe), compute)
