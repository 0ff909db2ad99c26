"""Gate stage `numbers` over one bundle.

Params: form, compute, context. Inputs: bundle, oracle; and weights with their reference, or tables for a front end.
"""

from workflow_scripts.gates import numbers
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("numbers", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    form, compute, bundle = job.params["form"], job.params["compute"], job.inputs["bundle"]
    if form == "frontend":
        oracle = Oracle.open(job.inputs["oracle"])
        ids = sorted({token for dialogue in oracle.dialogues.values() for token in dialogue.fed_ids})
        numbers.gate_frontend(verdict, bundle, RawTables.open(job.inputs["tables"]), ids, compute)
        return
    evidence = numbers.Evidence.open(job.inputs)
    if not numbers.check_evidence(verdict, evidence):
        return
    if form in numbers.CORE_ERRORS:
        numbers.gate_core(verdict, bundle, evidence, form, compute, job.params["context"])
    elif form == "head_argmax_metal":
        numbers.gate_partial_head(verdict, bundle, evidence, compute)
    else:
        numbers.gate_head(verdict, bundle, evidence, form, compute)
