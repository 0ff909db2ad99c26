"""Stage: weights -> one chunk of the decoder for the Neural Engine.

Params: compute `fp32`|`fp16`, context (past columns of the caches), layers [first, last).
"""

from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.ane_chunk import AneChunk
from workflow_scripts.model.ane_conv import exported_convs
from workflow_scripts.model.signature import ane_chunk
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, compute = Weights.open(job.inputs["weights"]), job.params["compute"]
    context, (first, last) = job.params["context"], job.params["layers"]
    dtype = torch_dtype(compute)
    spec = ane_chunk(weights.config, context, compute, layers=(first, last))["main"]
    chunk = AneChunk(weights, exported_convs(weights, dtype), dtype, (first, last), context)
    functions = [Function("main", chunk, spec)]
    save_weights_bundle(functions, weights, "ane_chunk", compute, job.out, layers=f"[{first}, {last})")
