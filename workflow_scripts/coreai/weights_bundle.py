"""Bundles that are made of a weights artifact, and what they say of themselves."""

from collections.abc import Sequence
from pathlib import Path

from coreai_torch import TorchMetalKernel

from workflow_scripts.coreai.convert import Function, save_bundle
from workflow_scripts.quantize.weights import Weights


def save_weights_bundle(
    functions: Sequence[Function],
    weights: Weights,
    form: str,
    compute: str,
    out: Path,
    kernels: Sequence[TorchMetalKernel] = (),
    **more: str,
) -> None:
    """Write the functions into the folder `out`; `more` is what the form says of itself beyond what all say."""
    description = {
        "form": form,
        "recipe": weights.recipe,
        "compute": compute,
        "checkpoint": weights.checkpoint_digest,
        **more,
    }
    save_bundle(functions, out, description, kernels)
