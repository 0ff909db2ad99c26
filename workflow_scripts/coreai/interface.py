"""Read a bundle's interface from its program, without loading its functions.

The Linux runtime resolves a function's operators when it loads it and has none for Metal kernels (measured: "Unresolved
symbol: coreai.metal4_kernel"), so a bundle with kernels tells its interface only this way.
"""

from pathlib import Path
from typing import Any

from coreai.authoring.asset import AIModelAsset

from workflow_scripts.coreai.private import mlir_module
from workflow_scripts.model.signature import FunctionSpec, TensorSpec

_DTYPES = {"f16": "float16", "f32": "float32", "si32": "int32"}


def read_interface(bundle: Path) -> dict[str, FunctionSpec]:
    """Function -> inputs and outputs. A damaged program aborts the process: call it through `isolated`."""
    program = AIModelAsset.load(bundle).program
    module = mlir_module(program)
    with module.context:
        graphs = [op for op in module.body if op.operation.name == "coreai.graph"]
        return {
            graph.attributes["sym_name"].value: _spec(graph)
            for graph in graphs
            if "priv" not in graph.attributes  # private graphs are parts of the others
        }


def _spec(graph: Any) -> FunctionSpec:
    kind = graph.attributes["function_type"].value
    return FunctionSpec(
        _tensors(graph.attributes["arg_attrs"], kind.inputs),
        _tensors(graph.attributes["res_attrs"], kind.results),
    )


def _tensors(names: Any, types: Any) -> dict[str, TensorSpec]:
    return {
        entry["coreai.name"].value: TensorSpec(
            _DTYPES.get(str(tensor.element_type), str(tensor.element_type)), tuple(tensor.shape)
        )
        for entry, tensor in zip(names, types, strict=True)
    }
