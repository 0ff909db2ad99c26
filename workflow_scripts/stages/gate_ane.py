"""Gate stage `ane` over one bundle for the Neural Engine. No params. Inputs: bundle."""

from workflow_scripts.coreai.ane_check import ane_problems
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    bundle = job.inputs["bundle"]
    verdict = Verdict("ane", bundle.name)
    with verdict.concluding(job.out):
        problems = ane_problems(bundle)
        found = "; ".join(problems) or "nothing"
        verdict.check("what the Neural Engine does not run", not problems, "nothing", found)
