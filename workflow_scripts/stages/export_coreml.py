"""Stage: weights, raw int8 tables and checkpoint -> the Core ML reference: NAME.mlpackage and head_rows.json.

Params: head_rows (rows of the pruned head), context (columns of the full caches).
"""

from workflow_scripts.checkpoint.needed import TOKENIZER
from workflow_scripts.coreml.contents import PACKAGE, interface
from workflow_scripts.coreml.convert import convert
from workflow_scripts.coreml.decoder import exported, state_decoder
from workflow_scripts.coreml.pruned_head import kept_ids, write_head_rows
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the package and the token ids of its head's rows."""
    context, rows = job.params["context"], job.params["head_rows"]
    weights, tables = Weights.open(job.inputs["weights"]), RawTables.open(job.inputs["tables"])
    ids = kept_ids(job.inputs["checkpoint"] / "source" / TOKENIZER, rows)
    spec = interface(weights, context, rows)
    program = exported(state_decoder(weights, tables, ids, context), spec)
    convert(program, spec, job.out / f"{job.out.name}{PACKAGE}")
    write_head_rows(job.out, ids)
