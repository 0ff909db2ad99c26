"""Gate stage `tokens` over one packaged folder: every dialogue under 256 positions.

No params. Inputs: folder, oracle, checkpoint; and tables_folder where another folder's tables give the embeddings.
"""

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tokens import dialogues_of, gate_dialogue, that_fit
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.release.folder_checks import check_folder
from workflow_scripts.release.plan import Plan
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("tokens", job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle, folder = Oracle.open(job.inputs["oracle"]), job.inputs["folder"]
    of_its_kind = dialogues_of(verdict, oracle, long_run=False)
    if not of_its_kind:
        return
    dialogues = that_fit(verdict, of_its_kind, Plan.open(folder).context)
    if not dialogues:
        return
    check_folder(verdict, job.inputs, dialogues)
    ids = {dialogue.name: dialogue.fed_ids for dialogue in dialogues}
    chosen = isolated(driver.follow, folder=str(folder), dialogues=ids)
    for dialogue in dialogues:
        gate_dialogue(verdict, dialogue, chosen[dialogue.name])
