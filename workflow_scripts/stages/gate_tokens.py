"""Gate stages `tokens` and `long_run` over one packaged folder.

Params: gate, `tokens` for the dialogues under 256 positions or `long_run` for the others. Inputs: folder, oracle.
"""

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tokens import gate_dialogue, is_long
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder, long_run = job.inputs["folder"], job.params["gate"] == "long_run"
    verdict = Verdict(job.params["gate"], folder.name)
    oracle = Oracle.open(job.inputs["oracle"])
    dialogues = [dialogue for dialogue in oracle.dialogues.values() if is_long(dialogue) == long_run]
    ids = {dialogue.name: dialogue.fed_ids for dialogue in dialogues}
    chosen = isolated(driver.follow, folder=str(folder), dialogues=ids)
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, chosen[dialogue.name])
    verdict.conclude(job.out)
