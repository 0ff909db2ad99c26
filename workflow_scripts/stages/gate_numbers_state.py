"""Gate stage `numbers` over one core whose kv_cache is a state.

Params: form `stateful_core`|`ring_core`|`blend_core`, compute, context; cache_minimum but of `blend_core`.
Inputs: bundle, oracle, weights with their reference.
"""

from workflow_scripts.gates.numbers import Evidence, check_evidence
from workflow_scripts.gates.state_numbers import gate_state_core
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    verdict = Verdict("numbers", job.inputs["bundle"].name)
    with verdict.concluding(job.out):
        evidence = Evidence.open(job.inputs)
        if check_evidence(verdict, evidence):
            gate_state_core(verdict, job.inputs["bundle"], evidence, **job.params)
