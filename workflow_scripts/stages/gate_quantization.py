"""Gate stage `quantization` over one weight recipe.

Params: recipe, min_margin (of the config's oracle). Inputs: checkpoint, oracle, weights, reference.
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates import quantization
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.quantize.recipes import get_recipe
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("quantization", job.params["recipe"])
    with verdict.concluding(job.out):
        recipe, weights = get_recipe(job.params["recipe"]), Weights.open(job.inputs["weights"])
        quantization.gate_tensors(verdict, Checkpoint.open(job.inputs["checkpoint"]), weights, recipe)
        oracle, arrays = Oracle.open(job.inputs["oracle"]), job.inputs["reference"] / "measured.npz"
        quantization.gate_answers(verdict, oracle, arrays, job.params["min_margin"])
