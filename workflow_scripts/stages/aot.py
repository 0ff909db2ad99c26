"""Stage `aot`: a bundle -> the same, compiled ahead of time for one architecture.

Input `bundle`. Params: the fields of `coreai.architectures.Target`. Beside `STEM.ARCHITECTURE.aimodelc` lie `aot.json`
(what was asked for, by which tool, and what came out) and `measured_compile.json` (seconds, peak of memory in bytes).
"""

from workflow_scripts.coreai.aot import compile_bundle
from workflow_scripts.coreai.architectures import Target
from workflow_scripts.files import write_json
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the compiled bundle and what is known of it."""
    compiled = compile_bundle(job.inputs["bundle"], Target(**job.params), job.out)
    write_json(job.out / "aot.json", compiled.record)
    measured = {"seconds": round(compiled.seconds, 3), "peak_bytes": compiled.peak_bytes}
    write_json(job.out / "measured_compile.json", measured)
