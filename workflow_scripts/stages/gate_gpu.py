"""Gate stage `gpu` over one packaged folder with Metal kernels.

No params. Inputs: folder, oracle; and tables_folder where another folder's tables give the embeddings.
"""

from pathlib import Path

import numpy as np

from workflow_scripts.coreai.gpu import gpu_options
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates.gpu import gate_answers, gate_sources
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.tables_folder import gate_tables_folder
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.release import driver
from workflow_scripts.release.plan import Plan
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill `job.out` with the verdict."""
    folder = job.inputs["folder"]
    verdict = Verdict("gpu", folder.name)
    with verdict.concluding(job.out):
        plan = Plan.open(folder)
        gate_tables_folder(verdict, plan.tables_elsewhere(folder), job.inputs.get("tables_folder"))
        gate_sources(verdict, [folder / name for name in plan.bundles.values()])
        gate_answers(
            verdict,
            Oracle.open(job.inputs["oracle"]),
            lambda dialogues: isolated(follow_on_gpu, folder=str(folder), dialogues=dialogues),
        )


def follow_on_gpu(folder: str, dialogues: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """`driver.follow` with bundles that are loaded for the GPU (for `isolated`)."""
    with driver.open_set(Path(folder), gpu_options()) as bundles:
        return driver.follow_in(bundles, dialogues)
