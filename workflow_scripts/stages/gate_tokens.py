"""Gate stages `tokens` and `long_run` over one packaged folder.

Params: gate, `tokens` for the dialogues under 256 positions or `long_run` for the others. Inputs: folder, oracle.
"""

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tokens import gate_dialogue, is_long
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.stages.runner import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder, long_run = job.inputs["folder"], job.params["gate"] == "long_run"
    verdict = Verdict(job.params["gate"], folder.name)
    for dialogue in Oracle.open(job.inputs["oracle"]).dialogues.values():
        if is_long(dialogue) == long_run:
            chosen = isolated(driver.follow, folder=str(folder), ids=dialogue.fed_ids)["chosen"]
            gate_dialogue(verdict, dialogue, chosen)
    verdict.conclude(job.out)
