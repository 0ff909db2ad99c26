"""Stage: weights, raw tables and oracle -> the reference numbers of token decoders made of them. No params."""

from workflow_scripts.gates.make_decode_reference import build_decode_reference
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.open import open_tables


def run(job: Job) -> None:
    """Fill `job.out` with reference.json and measured.npz."""
    inputs = job.inputs
    weights, tables = Weights.open(inputs["weights"]), open_tables(inputs["tables"])
    build_decode_reference(weights, tables, Oracle.open(inputs["oracle"]), job.out)
