"""Stage: checkpoint from quantization-aware training -> raw gather dump on its 4-bit grid. No params."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.int4_writer import write_int4_tables
from workflow_scripts.threads import available_threads


def run(job: Job) -> None:
    """Fill `job.out` with the seven files of the dump."""
    write_int4_tables(Checkpoint.open(job.inputs["checkpoint"]), job.out, threads=available_threads())
