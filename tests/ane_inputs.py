"""What the tests of the Neural Engine set look at: real chunks of the embedded checkpoint, each made once."""

import json
from functools import cache
from pathlib import Path

import gate_inputs as given

from workflow_scripts.gates.chunks import ChunkEvidence
from workflow_scripts.gates.numbers import Evidence
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model.chunks import chunk_plan, plan_json
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.release.names import CHUNKS_PLAN

CONTEXT = 64
RANGES = [(0, 3), (3, 5), (5, 10)]  # without K/V for others, with both producers, without any of its own
DIALOGUE = given.FRANCE["name"]


@cache
def chunk(run_stage, weights: Path, compute: str, number: int) -> Path:
    """A real chunk; export takes about a second per layer."""
    return run_stage(
        "export_ane_chunk",
        f"{weights.name}_{compute}_chunk{number + 1}.aimodel",
        {"weights": manifest_path(weights)},
        compute=compute,
        context=CONTEXT,
        layers=list(RANGES[number]),
    )


@cache
def chunk_set(run_stage, weights: Path, compute: str) -> Path:
    """The plan of real chunks beside them."""
    bundles = [chunk(run_stage, weights, compute, number) for number in range(len(RANGES))]
    plan = chunk_plan(Weights.open(weights).config, RANGES, CONTEXT)
    path = bundles[0].parent / CHUNKS_PLAN
    path.write_text(json.dumps(plan_json(plan, compute, [bundle.name for bundle in bundles])))
    return path


@cache
def head(run_stage, weights: Path, compute: str) -> Path:
    """A real head for the Neural Engine."""
    inputs = {"weights": manifest_path(weights)}
    return run_stage("export_ane_head", f"ane_head_{weights.name}.aimodel", inputs, compute=compute)


@cache
def evidence(run_stage, checkpoint: Path, weights: Path) -> ChunkEvidence:
    """What chunks of a recipe are compared with."""
    recipe = Evidence.open(
        {
            "oracle": given.oracle(run_stage, checkpoint),
            "weights": weights,
            "reference": given.reference(run_stage, checkpoint, weights),
        }
    )
    return ChunkEvidence(chunk_plan(recipe.weights.config, RANGES, CONTEXT), recipe)
