"""Stage: checkpoint, weights and oracle -> the recipe's reference numbers. No params."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.make_reference import build_reference
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with reference.json and measured.npz."""
    inputs = job.inputs
    build_reference(
        Checkpoint.open(inputs["checkpoint"]),
        Weights.open(inputs["weights"]),
        Oracle.open(inputs["oracle"]),
        job.out,
    )
