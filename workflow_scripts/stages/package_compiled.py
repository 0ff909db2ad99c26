"""Stage `package_compiled`: the release folder of one bundle that was compiled ahead of time.

Input `compiled`, a result of stage `aot`; and where what was compiled is a language bundle `twin`, its packaged folder.
"""

from workflow_scripts.release.compiled import place_compiled, place_language
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill the folder."""
    place_compiled(job.inputs["compiled"], job.out)
    if "twin" in job.inputs:
        place_language(job.inputs["twin"], job.out)
