"""Gate `coreml_prediction`: the ids that Core ML itself chooses, on a Mac; elsewhere it says why it did not run."""

from pathlib import Path

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.coreml.contents import PACKAGE
from workflow_scripts.coreml.installed import why_no_core_ml
from workflow_scripts.coreml.predict import predict
from workflow_scripts.coreml.pruned_head import read_head_rows
from workflow_scripts.gates.coreml_numbers import compare_choices, dialogue_ids, kept_logits, state_bounds
from workflow_scripts.gates.decode_numbers import DecodeEvidence
from workflow_scripts.gates.verdict import Verdict


def gate_coreml_prediction(
    verdict: Verdict, folder: Path, evidence: DecodeEvidence, context: int, macos: str
) -> None:
    """The chosen ids by Core ML itself; `macos` is the version of the system, `none` elsewhere."""
    reason = why_no_core_ml(macos)
    if reason:
        verdict.not_run(reason)
        return
    ids = dialogue_ids(verdict, evidence, context)
    package = str(folder / f"{folder.name}{PACKAGE}")
    found = isolated(predict, package=package, tables=str(evidence.tables), ids=ids)
    rows = read_head_rows(folder)
    kept, limits = kept_logits(evidence, rows, ids), state_bounds(evidence, ids)
    compare_choices(verdict, evidence.recipe, rows, kept, found, limits)
