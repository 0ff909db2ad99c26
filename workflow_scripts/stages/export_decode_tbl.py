"""Stage: weights and raw tables -> bundle of graph form `decode_tbl` (the whole per-layer table is an input).

Params: compute `fp32`|`fp16`, context (columns of the caches at most), cache_minimum (at least).
"""

import torch

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.model.decode import DecodeTable
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import COMPUTE_DTYPES, decode_tbl
from workflow_scripts.model.token_decoder import token_decoder
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    weights, tables = Weights.open(job.inputs["weights"]), RawTables.open(job.inputs["tables"])
    compute, context = job.params["compute"], job.params["context"]
    dtype = getattr(torch, COMPUTE_DTYPES[compute])
    spec = decode_tbl(weights.config, context, compute, cache_minimum=job.params["cache_minimum"])["main"]
    model = token_decoder(weights, tables, exported_linears(weights, dtype), dtype)
    description = {
        "form": "decode_tbl",
        "recipe": weights.recipe,
        "tables": "int8",
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
    save_bundle([Function("main", DecodeTable(model), spec)], job.out, description)
