"""Gate stage `kernels` over one bundle with Metal kernels. Params: form, compute. Inputs: bundle, weights."""

import tempfile
from pathlib import Path

from workflow_scripts.gates.kernel_runs import Harness
from workflow_scripts.gates.kernel_source import our_sources
from workflow_scripts.gates.kernels import Claim, gate_kernels
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    bundle = job.inputs["bundle"]
    verdict = Verdict("kernels", bundle.name)
    with verdict.concluding(job.out), tempfile.TemporaryDirectory() as programs:
        form, compute = job.params["form"], job.params["compute"]
        claim = Claim(form, compute, Weights.open(job.inputs["weights"]), our_sources())
        gate_kernels(verdict, bundle, claim, Harness(Path(programs)))
