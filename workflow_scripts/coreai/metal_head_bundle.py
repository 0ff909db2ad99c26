"""What the exports of graph form `head_argmax_metal` share: the kernel is the whole graph, and each brings its own."""

from collections.abc import Callable
from pathlib import Path

from coreai_torch import TorchMetalKernel
from torch import nn

from workflow_scripts.coreai.convert import Function
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import head_argmax_metal
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch


def save_metal_head(
    tree: Path,
    kernel: TorchMetalKernel,
    head: Callable[[Weights, str, Scratch], nn.Module],
    *,
    compute: str,
    out: Path,
) -> None:
    """Write the head of a weights artifact into the folder `out`; `head` makes the layer that calls `kernel`.

    Raises UserError naming the matrix where the kernel cannot take it.
    """
    weights = Weights.open(tree)
    spec = head_argmax_metal(weights.config, 0, compute)["main"]
    functions = [Function("main", head(weights, HEAD_WEIGHT, Scratch(out.parent)), spec)]
    save_weights_bundle(functions, weights, "head_argmax_metal", compute, out, [kernel])
