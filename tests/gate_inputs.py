"""What the tests of the gates judge: real bundles and evidence of the embedded checkpoint, each made once."""

import importlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.conftest import TINY
from tests.tiny import Dims, Tensors, write_checkpoint
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.errors import GateFailed
from workflow_scripts.manifest import manifest_path
from workflow_scripts.stages.job import Job

INT8 = "int8-kmeans-g32"
INT4 = "int4-kmeans-g32"
CONTEXT = 64
FRANCE = {"name": "france", "turns": ["What is the capital of France?"], "new_tokens": 8, "numbers": True}
BABBLE = {
    "name": "babble",
    "prompt_ids": [2, 105, *range(40, 50)],
    "new_tokens": 8,
    "numbers": True,
    "skip_ties": True,
}


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
    dialogue = FRANCE if checkpoint.name == "text" else BABBLE
    return run_stage("oracle", f"of_{checkpoint.name}", inputs, min_margin=0.1, dialogues=[dialogue])


@cache
def reference(run_stage, checkpoint: Path, weights: Path) -> Path:
    """The reference of a recipe for the oracle's dialogue."""
    inputs = {
        "checkpoint": manifest_path(checkpoint),
        "weights": manifest_path(weights),
        "oracle": manifest_path(oracle(run_stage, checkpoint)),
    }
    return run_stage("reference", f"{checkpoint.name}_{weights.name}", inputs)


@cache
def recipe_evidence(run_stage, checkpoint: Path, recipe: str) -> dict[str, Path]:
    """Inputs of the gates over a recipe, but for a bundle: checkpoint, oracle, weights, reference."""
    inputs = {"checkpoint": manifest_path(checkpoint)}
    weights = run_stage("weights", f"{checkpoint.name}_{recipe}", inputs, recipe=recipe)
    return {
        "checkpoint": checkpoint,
        "oracle": oracle(run_stage, checkpoint),
        "weights": weights,
        "reference": reference(run_stage, checkpoint, weights),
    }


# Bundles with kernels are those of a small random model, since export takes its time by the number of layers. Between
# the two widths everything occurs: both compute types, and beside the kernels palettes and float16.
KERNELS = {8: {"recipe": INT8, "compute": "fp32"}, 4: {"recipe": INT4, "compute": "fp16"}}
FORMS = {"core": "hostcache_metal", "head": "head_argmax_metal"}


def kernel_params(part: str, bits: int) -> dict:
    """Params of the gates over a bundle with kernels."""
    return {"form": FORMS[part], "compute": KERNELS[bits]["compute"], "context": CONTEXT}


@cache
def kernel_bundle(run_stage, part: str, bits: int) -> Path:
    """A real `core` or `head` with kernels of some width."""
    weights = kernel_evidence(run_stage, bits)["weights"]
    stage, params = (
        f"export_metal_{part}_int{bits}",
        {"compute": KERNELS[bits]["compute"], "context": CONTEXT},
    )
    return run_stage(stage, f"small_{part}{bits}.aimodel", {"weights": manifest_path(weights)}, **params)


@cache
def kernel_evidence(run_stage, bits: int) -> dict[str, Path]:
    """As `recipe_evidence`, of the small model."""
    return recipe_evidence(run_stage, _small_checkpoint(run_stage), KERNELS[bits]["recipe"])


@cache
def _small_checkpoint(run_stage) -> Path:
    dims = Dims(layer_types=(SLIDING, FULL), num_kv_shared_layers=0, use_double_wide_mlp=False)
    params = {"source": "small", "allow_moving_revision": False, "sha256": {}, "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as folder:
        source = write_checkpoint(Path(folder), dims, edit_tensors=_soften_attention)
        shutil.copy(TINY / "chat_template.jinja", source)
        return run_stage("checkpoint", "small", {"source": source}, **params)


def _soften_attention(tensors: Tensors) -> None:
    """Scores of unit variance, as a model learns them: much sharper attention multiplies float16's errors."""
    for name, values in tensors.items():
        if name.endswith("q_norm.weight"):
            tensors[name] = (values.astype("float32") * len(values) ** -0.5).astype(values.dtype)


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
