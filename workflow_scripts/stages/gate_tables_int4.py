"""Gate stage `tables` over one raw gather dump on the 4-bit grid. No params. Inputs: tables, checkpoint."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.tables_int4 import gate_tables_int4
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.int4 import Int4Tables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("tables", job.inputs["tables"].name)
    with verdict.concluding(job.out):
        tables, checkpoint = Int4Tables.open(job.inputs["tables"]), Checkpoint.open(job.inputs["checkpoint"])
        gate_tables_int4(verdict, tables, checkpoint)
