"""Gate stage `tables` over one raw gather dump. No params. Inputs: tables, checkpoint."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.tables import gate_tables
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("tables", job.inputs["tables"].name)
    with verdict.concluding(job.out):
        gate_tables(verdict, RawTables.open(job.inputs["tables"]), Checkpoint.open(job.inputs["checkpoint"]))
