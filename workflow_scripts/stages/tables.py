"""Stage: checkpoint -> raw gather dump of the token embedding and the per-layer embedding tables. No params."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.writer import write_raw_tables
from workflow_scripts.threads import available_threads


def run(job: Job) -> None:
    """Fill `job.out` with the seven files of the dump."""
    write_raw_tables(Checkpoint.open(job.inputs["checkpoint"]), job.out, threads=available_threads())
