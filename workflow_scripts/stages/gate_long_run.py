"""Gate stage `long_run` over one packaged folder: every dialogue of 256 positions and more, as far as there is room.

No params. Inputs: folder, oracle, checkpoint; weights, if the set's logits are made of them and its hidden state;
and tables_folder where another folder's tables give the embeddings.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.divergence import divergence, gate_divergence
from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.tokens import cut_to_fit, dialogues_of, gate_dialogue
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.release import driver
from workflow_scripts.release.folder_checks import check_folder
from workflow_scripts.release.plan import Plan
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("long_run", job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle, folder = Oracle.open(job.inputs["oracle"]), job.inputs["folder"]
    whole = dialogues_of(verdict, oracle, long_run=True)
    if not whole:
        return
    check_folder(verdict, job.inputs, whole)
    dialogues = cut_to_fit(verdict, whole, Plan.open(folder).context)
    ids = {dialogue.name: dialogue.fed_ids for dialogue in dialogues}
    found = isolated(driver.watch, folder=str(folder), dialogues=ids)
    checkpoint = Checkpoint.open(job.inputs["checkpoint"])
    weights = Weights.open(job.inputs["weights"]) if "weights" in job.inputs else None
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, found[f"{dialogue.name}.ids"])
        blocks = _logits(dialogue, oracle, checkpoint, weights, found)
        gate_divergence(verdict, dialogue.name, divergence(blocks))


def _logits(
    dialogue: Dialogue,
    oracle: Oracle,
    checkpoint: Checkpoint,
    weights: Weights | None,
    found: Mapping[str, np.ndarray],
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits of the original and of the set, a block of ids at a time: all of E2B's have 0.3 GB each.

    The original's are made of the oracle's hidden rows and the checkpoint's tied embedding, a set's without logits of
    its own of its hidden rows and the head's stored codes.
    """
    softcap = checkpoint.config.final_logit_softcapping
    hidden = oracle.hidden(dialogue.name)[: len(dialogue.fed_ids)]
    for block in row_blocks(checkpoint.shape(HEAD_WEIGHT)):
        original = _capped(hidden @ checkpoint.float32(HEAD_WEIGHT, block).T, softcap)
        if weights is None:
            yield original, found[f"{dialogue.name}.logits"][:, block]
        else:
            rows = found[f"{dialogue.name}.hidden"]
            yield original, _capped(rows @ weights.linear(HEAD_WEIGHT).dequantize(block).T, softcap)


def _capped(scores: np.ndarray, softcap: float) -> np.ndarray:
    return np.tanh(scores / softcap) * softcap
