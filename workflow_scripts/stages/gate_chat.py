"""Gate stage `chat` over one packaged folder: the reply a user would see. Params: prompt, expect. Input: folder."""

from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release.chat import reply
from workflow_scripts.stages.job import Job

_NEW_TOKENS = 64


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder, prompt, expected = job.inputs["folder"], job.params["prompt"], job.params["expect"]
    verdict = Verdict("chat", folder.name)
    with verdict.concluding(job.out):
        found = reply(folder, prompt, _NEW_TOKENS)
        verdict.check(prompt, found == expected, expected, found)
