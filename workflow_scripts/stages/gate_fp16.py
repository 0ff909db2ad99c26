"""Gate stage `fp16` over one packaged folder with driver `chunks`: its decoder in emulated float16.

No params. Inputs: folder, oracle, weights of the chunks with their reference.
"""

import numpy as np

from workflow_scripts.coreai.chunk_bundles import read_plan
from workflow_scripts.gates.fp16_evidence import gate_half_chain, gate_half_norms
from workflow_scripts.gates.numbers import Evidence, check_evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.chunks import chunk_plan
from workflow_scripts.release.names import CHUNKS_PLAN
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("fp16", job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    evidence = Evidence.open(job.inputs)
    if not check_evidence(verdict, evidence):
        return
    plan = read_plan(job.inputs["folder"] / CHUNKS_PLAN)
    ranges = [chunk["layers"] for chunk in plan["chunks"]]
    gate_half_norms(verdict)
    with np.load(evidence.arrays) as arrays:
        chunks = chunk_plan(evidence.weights.config, ranges, plan["context"])
        gate_half_chain(verdict, chunks, evidence.weights, evidence.oracle, arrays)
