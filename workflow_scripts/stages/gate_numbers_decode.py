"""Gate stage `numbers` over one token decoder.

Params: form `decode`|`decode_tbl`|`decode_ring`, compute, context; cache_minimum, or capacities of `decode_ring`.
Inputs: bundle, oracle, weights, tables, and reference, the result of stage `decode_reference` for them.
"""

from workflow_scripts.gates.decode_numbers import DecodeEvidence, check_decode_evidence, gate_decoder
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("numbers", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        evidence = DecodeEvidence.open(job.inputs)
        if check_decode_evidence(verdict, evidence):
            gate_decoder(verdict, job.inputs["bundle"], evidence, job.params)
