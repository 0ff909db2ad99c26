"""Gate stage `chat` over one packaged folder: the reply a user would see. Params: prompt, expect. Input: folder."""

from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.chat import reply
from workflow_scripts.stages.job import Job

_NEW_TOKENS = 64


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder, expected = job.inputs["folder"], job.params["expect"]
    verdict = Verdict("chat", folder.name)
    found = reply(folder, job.params["prompt"], _NEW_TOKENS)
    verdict.check(job.params["prompt"], found == expected, expected, found)
    verdict.conclude(job.out)
