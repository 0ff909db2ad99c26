"""Stage: checkpoint -> oracle.

Params: min_margin; dialogues, a list of mappings as in the config's `oracle.dialogues`; context, the positions that a
bundle's kv_cache holds (optional: without it nothing is too long).
"""

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.make_oracle import Request, build_oracle
from workflow_scripts.release.tokenizer import ChatTokenizer, check_vocabulary
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with oracle.json, measured.json and measured.npz."""
    requests = [
        Request(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
        for entry in job.params["dialogues"]
    ]
    checkpoint, context = Checkpoint.open(job.inputs["checkpoint"]), job.params.get("context")
    # Before the model is loaded: what no folder could chat with, the oracle need not answer.
    check_vocabulary(ChatTokenizer.open(checkpoint.source), checkpoint.config)
    build_oracle(checkpoint, requests, job.params["min_margin"], job.out, context)
