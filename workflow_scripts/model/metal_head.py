"""Graph form `head_argmax_metal`: the kernel or its twin is the whole graph; this is what a bundle says of itself."""

from workflow_scripts.quantize.weights import Weights


def head_description(weights: Weights, compute: str) -> dict[str, str]:
    """What the bundle of a head says about itself."""
    return {
        "form": "head_argmax_metal",
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
    }
