"""Stage: weights and raw tables -> bundle of graph form `decode` (the per-layer table's row is an input).

The tables may have either layout.
Params: compute `fp32`|`fp16`, context (columns of the caches at most), cache_minimum (at least).
"""

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.coreai.convert import Function
from workflow_scripts.coreai.decode_bundle import save_decode
from workflow_scripts.model.decode import Decode
from workflow_scripts.model.signature import decode
from workflow_scripts.model.token_decoder import TokenDecoder
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    compute, context, minimum = (job.params[name] for name in ("compute", "context", "cache_minimum"))

    def functions(model: TokenDecoder, config: TextConfig, tables: str) -> list[Function]:
        spec = decode(config, context, compute, cache_minimum=minimum, tables=tables)["main"]
        return [Function("main", Decode(model), spec)]

    save_decode(job.inputs, "decode", compute, functions, job.out)
