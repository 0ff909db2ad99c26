"""Gate stage `chat` over one packaged folder: the reply a user would see.

Params: prompt, expect. Inputs: folder; and tables_folder where another folder's tables give the embeddings.
"""

from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.chat import reply
from workflow_scripts.release.plan import Plan
from workflow_scripts.stages.job import Job

_NEW_TOKENS = 64


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder, prompt, expected = job.inputs["folder"], job.params["prompt"], job.params["expect"]
    verdict = Verdict("chat", folder.name)
    with verdict.concluding(job.out):
        tables = Plan.open(folder).tables_elsewhere(folder)
        gate_tables_folder(verdict, tables, job.inputs.get("tables_folder"))
        found = reply(folder, prompt, _NEW_TOKENS)
        verdict.check(prompt, found == expected, expected, found)
