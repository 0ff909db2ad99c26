"""Stage: checkpoint -> quantized weights. Params: recipe (a name of `workflow_scripts/quantize/recipes.py`)."""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.quantize.recipes import get_recipe
from workflow_scripts.quantize.writer import write_weights
from workflow_scripts.stages.job import Job
from workflow_scripts.threads import available_threads


def run(job: Job) -> None:
    """Fill `job.out` with the weights, their index and their quality report."""
    recipe = get_recipe(job.params["recipe"])
    write_weights(Checkpoint.open(job.inputs["checkpoint"]), recipe, job.out, available_threads())
