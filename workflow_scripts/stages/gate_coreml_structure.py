"""Gate stage `coreml_structure` over the Core ML reference.

Params: head_rows, context. Inputs: package (result of stage `export_coreml`), checkpoint, weights, tables.
"""

from workflow_scripts.checkpoint.needed import TOKENIZER
from workflow_scripts.coreml.pruned_head import kept_ids
from workflow_scripts.gates.coreml_structure import Claim, gate_coreml_structure
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job
from workflow_scripts.tables.raw import RawTables


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("coreml_structure", job.inputs["package"].name)
    with verdict.concluding(job.out):
        claim = Claim(
            Weights.open(job.inputs["weights"]),
            RawTables.open(job.inputs["tables"]),
            kept_ids(job.inputs["checkpoint"] / "source" / TOKENIZER, job.params["head_rows"]),
            job.params["context"],
        )
        gate_coreml_structure(verdict, job.inputs["package"], claim)
