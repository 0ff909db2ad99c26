"""Gate stage `coreml_prediction` over the Core ML reference.

Params: context, macos (version of the system, `none` elsewhere: a Mac then runs what Linux could not).
Inputs: package (of stage `export_coreml`), oracle, weights, tables, and reference (of stage `decode_reference`).
"""

from workflow_scripts.gates.coreml_prediction import gate_coreml_prediction
from workflow_scripts.gates.decode_numbers import DecodeEvidence, check_decode_evidence
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("coreml_prediction", job.inputs["package"].name)
    with verdict.concluding(job.out):
        evidence = DecodeEvidence.open(job.inputs)
        if check_decode_evidence(verdict, evidence):
            gate_coreml_prediction(
                verdict, job.inputs["package"], evidence, job.params["context"], job.params["macos"]
            )
