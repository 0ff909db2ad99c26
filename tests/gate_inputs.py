"""What the tests of the gates judge: real bundles and evidence of the embedded checkpoint, each made once."""

import importlib
import json
from functools import cache
from pathlib import Path

from workflow_scripts.errors import GateFailed
from workflow_scripts.manifest import manifest_path
from workflow_scripts.stages.job import Job

INT8 = "int8-kmeans-g32"
CONTEXT = 64
FRANCE = {"name": "france", "turns": ["What is the capital of France?"], "new_tokens": 8, "numbers": True}


@cache
def head(run_stage, weights: Path) -> Path:
    """A real int8 argmax head."""
    inputs = {"weights": manifest_path(weights)}
    return run_stage(
        "export_head", "head.aimodel", inputs, form="head_argmax", compute="fp16", context=CONTEXT
    )


@cache
def core(run_stage, weights: Path) -> Path:
    """A real float32 core; the slowest of the bundles to make."""
    inputs = {"weights": manifest_path(weights)}
    return run_stage(
        "export_hostcache", "core.aimodel", inputs, form="hostcache_core", compute="fp32", context=CONTEXT
    )


@cache
def frontend(run_stage, tables: Path, checkpoint: Path, compute: str) -> Path:
    """A real front end."""
    inputs = {"tables": manifest_path(tables), "checkpoint": manifest_path(checkpoint)}
    return run_stage(
        "export_frontend",
        f"frontend_{compute}.aimodel",
        inputs,
        form="frontend",
        compute=compute,
        context=CONTEXT,
    )


@cache
def oracle(run_stage, checkpoint: Path) -> Path:
    """The oracle of one short dialogue."""
    inputs = {"checkpoint": manifest_path(checkpoint)}
    return run_stage("oracle", "dialogues", inputs, min_margin=0.1, dialogues=[FRANCE])


@cache
def reference(run_stage, checkpoint: Path, weights: Path) -> Path:
    """The reference of a recipe for the oracle's dialogue."""
    inputs = {
        "checkpoint": manifest_path(checkpoint),
        "weights": manifest_path(weights),
        "oracle": manifest_path(oracle(run_stage, checkpoint)),
    }
    return run_stage("reference", weights.name, inputs)


def judge(gate: str, inputs: dict[str, Path], out: Path, /, **params) -> dict[str, str]:
    """Run a gate stage over folders as they are; the failed checks of the verdict it wrote, with what they found."""
    out.mkdir(parents=True)
    raised = False
    try:
        importlib.import_module(f"workflow_scripts.stages.{gate}").run(Job(inputs, {}, params, out))
    except GateFailed:
        raised = True
    verdict = json.loads((out / "verdict.json").read_text())
    assert (verdict["verdict"] == "fail") == raised
    assert ("FAIL" in (out / "measured_table.txt").read_text()) == raised
    return {check["name"]: check["found"] for check in verdict["checks"] if not check["passed"]}
