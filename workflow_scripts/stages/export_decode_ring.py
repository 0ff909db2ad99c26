"""Stage: weights and raw tables -> bundle of graph form `decode_ring` (static; one function per capacity).

The tables may have either layout.
Params: compute `fp32`|`fp16`, context (the largest capacity), capacities (columns of the full caches, ascending).
"""

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.coreai.convert import Function
from workflow_scripts.coreai.decode_bundle import save_decode
from workflow_scripts.model.decode_ring import DecodeRing
from workflow_scripts.model.signature import decode_ring
from workflow_scripts.model.token_decoder import TokenDecoder
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the bundle."""
    compute, context, capacities = (job.params[name] for name in ("compute", "context", "capacities"))

    def functions(model: TokenDecoder, config: TextConfig, tables: str) -> list[Function]:
        specs = decode_ring(config, context, compute, capacities=capacities, tables=tables)
        return [
            Function(name, DecodeRing(model, capacity), spec)
            for capacity, (name, spec) in zip(capacities, specs.items(), strict=True)
        ]

    save_decode(job.inputs, "decode_ring", compute, functions, job.out)
