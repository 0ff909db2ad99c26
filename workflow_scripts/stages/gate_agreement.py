"""Gate stage `agreement` over all folders that chat.

Params: positions, the room of each folder by its name. Inputs: `GATE:FOLDER`, verdicts with ids.
"""

from workflow_scripts.gates.agreement import gate_agreement
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.gate_results import read_gate
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    positions = job.params["positions"]
    verdict = Verdict("agreement", "folders")
    with verdict.concluding(job.out):
        folders: dict[str, dict[str, list[int]]] = {folder: {} for folder in positions}
        for name, tree in sorted(job.inputs.items()):
            gate, _, folder = name.partition(":")
            tokens = read_gate(name, tree).verdict["tokens"]
            folders[folder] |= {f"{gate}: {dialogue}": ids for dialogue, ids in tokens.items()}
        gate_agreement(verdict, folders, positions)
