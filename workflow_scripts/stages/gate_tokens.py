"""Gate stages `tokens` and `long_run` over one packaged folder.

Params: gate, `tokens` for the dialogues under 256 positions or `long_run` for the others. Inputs: folder, oracle.
"""

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tokens import dialogues_of, gate_dialogue
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict(job.params["gate"], job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle = Oracle.open(job.inputs["oracle"])
    dialogues = dialogues_of(verdict, oracle, job.params["gate"] == "long_run")
    if not dialogues:
        return
    ids = {dialogue.name: dialogue.fed_ids for dialogue in dialogues}
    chosen = isolated(driver.follow, folder=str(job.inputs["folder"]), dialogues=ids)
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, chosen[dialogue.name])
