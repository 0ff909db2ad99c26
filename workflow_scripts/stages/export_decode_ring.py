"""Stage: weights and raw tables -> bundle of graph form `decode_ring` (static; one function per capacity).

Params: compute `fp32`|`fp16`, context (the largest capacity), capacities (columns of the full caches, ascending).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.decode_ring import DecodeRing
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import COMPUTE_DTYPES, decode_ring
from workflow_scripts.model.token_decoder import token_decoder
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, tables = Weights.open(job.inputs["weights"]), RawTables.open(job.inputs["tables"])
    compute, context = job.params["compute"], job.params["context"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    capacities = job.params["capacities"]
    specs = decode_ring(weights.config, context, compute, capacities=capacities)
    model = token_decoder(weights, tables, exported_linears(weights, dtype), dtype)
    description = {
        "form": "decode_ring",
        "recipe": weights.recipe,
        "tables": "int8",
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    functions = [
        Function(name, DecodeRing(model, capacity), spec)
        for capacity, (name, spec) in zip(capacities, specs.items(), strict=True)
    ]
    save_bundle(functions, job.out, description)
