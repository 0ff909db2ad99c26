"""Gate stage `coreml_numbers` over the Core ML reference.

Params: context.
Inputs: package (of stage `export_coreml`), oracle, weights, tables, and reference (of stage `decode_reference`).
"""

from workflow_scripts.gates.coreml_numbers import gate_coreml_numbers
from workflow_scripts.gates.decode_numbers import DecodeEvidence, check_decode_evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("coreml_numbers", job.inputs["package"].name)
    with verdict.concluding(job.out):
        evidence = DecodeEvidence.open(job.inputs)
        if check_decode_evidence(verdict, evidence):
            gate_coreml_numbers(verdict, job.inputs["package"], evidence, job.params["context"])
