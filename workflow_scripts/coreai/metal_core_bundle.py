"""What the exports of graph form `hostcache_metal` share: each brings its own kernel."""

from collections.abc import Callable
from pathlib import Path

from coreai_torch import TorchMetalKernel

from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.model.metal_core import metal_core
from workflow_scripts.model.signature import hostcache_metal
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch


def save_metal_core(
    tree: Path,
    kernel: TorchMetalKernel,
    mlp: Callable[[Weights, Scratch], LinearFactory],
    *,
    context: int,
    compute: str,
    out: Path,
) -> None:
    """Write the core of a weights artifact into the folder `out`; `mlp` makes its layers that call `kernel`.

    Raises UserError naming a matrix that the kernel cannot take, and for a context beyond the model's.
    """
    weights = Weights.open(tree)
    spec = hostcache_metal(weights.config, context, compute)["main"]
    scratch = Scratch(out.parent)
    core = metal_core(weights, mlp(weights, scratch), torch_dtype(compute), scratch)
    save_weights_bundle([Function("main", core, spec)], weights, "hostcache_metal", compute, out, [kernel])
