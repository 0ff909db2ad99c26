"""Gate stage `quantization` over one weight recipe. Params: recipe. Inputs: oracle, weights, reference."""

from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.quantization import gate_quantization
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    recipe = job.params["recipe"]
    verdict = Verdict("quantization", recipe)
    arrays = job.inputs["reference"] / "measured.npz"
    gate_quantization(verdict, Oracle.open(job.inputs["oracle"]), job.inputs["weights"], arrays, recipe)
    verdict.conclude(job.out)
