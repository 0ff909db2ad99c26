"""What the exports of cores share: the decoder over an artifact's stored weights, each in a graph form of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from workflow_scripts.coreai.convert import Function, torch_dtype
from workflow_scripts.coreai.weights_bundle import save_weights_bundle
from workflow_scripts.model.decoder import Decoder
from workflow_scripts.model.linear import exported_linears
from workflow_scripts.model.signature import FunctionSpec
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch


def save_core(
    weights: Weights,
    form: str,
    compute: str,
    specs: Mapping[str, FunctionSpec],
    wraps: Mapping[str, Callable[[Decoder], nn.Module]],
    out: Path,
) -> None:
    """Write the core into the folder `out`; per function, a wrap puts the decoder into the module of the graph form."""
    dtype = torch_dtype(compute)
    decoder = Decoder(weights, exported_linears(weights, dtype, Scratch(out.parent)), dtype)
    functions = [Function(name, wraps[name](decoder), spec) for name, spec in specs.items()]
    save_weights_bundle(functions, weights, form, compute, out)
