"""Gate stage `chat` over one packaged folder: it answers freely, turn by turn, as a user would see it.

Params: dialogues, names of some of the oracle's. Inputs: folder, oracle; and tables_folder where another folder's
tables give the embeddings.
"""

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.tokens import gate_answers, that_fit
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.chat import converse
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import ChatTokenizer
from workflow_scripts.stages.job import Job

_NEW_TOKENS = 64  # where a set does not stop, it is told here


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("chat", job.inputs["folder"].name)
    with verdict.concluding(job.out):
        _compare(verdict, job)


def _compare(verdict: Verdict, job: Job) -> None:
    oracle, folder = Oracle.open(job.inputs["oracle"]), job.inputs["folder"]
    plan = Plan.open(folder)
    gate_tables_folder(verdict, plan.tables_elsewhere(folder), job.inputs.get("tables_folder"))
    missing = [name for name in job.params["dialogues"] if name not in oracle.dialogues]
    if missing:
        verdict.check("dialogues", False, "all in the oracle", f"no {missing[0]}")
        return
    asked = [oracle.dialogues[name] for name in job.params["dialogues"]]
    dialogues = that_fit(verdict, asked, plan.context)
    if not dialogues:
        return
    said = {dialogue.name: dialogue.said for dialogue in dialogues}
    found = isolated(converse, folder=str(folder), dialogues=said, new_tokens=_NEW_TOKENS)
    tokenizer = ChatTokenizer.open(folder / plan.tokenizer)
    for dialogue in dialogues:
        gate_answers(verdict, dialogue, found, plan.stop_token_ids, tokenizer.decode)
