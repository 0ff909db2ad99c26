"""Exported program -> `.mlpackage`, with the same bytes on every host."""

import json
from pathlib import Path
from typing import Any

import coremltools
import numpy as np
import torch
from coremltools.converters.mil import Builder
from coremltools.converters.mil.frontend.torch import register_torch_op
from coremltools.converters.mil.frontend.torch.ops import _get_inputs
from coremltools.converters.mil.mil import types

from workflow_scripts.errors import UserError
from workflow_scripts.files import write_atomic, write_json
from workflow_scripts.model.signature import FunctionSpec

MODEL, WEIGHTS = "com.apple.CoreML/model.mlmodel", "com.apple.CoreML/weights"
"""Paths of a package's two items below its folder `Data`."""
# Coremltools draws them anew for every package; what an item is called inside decides nothing.
_IDENTIFIERS = {
    MODEL: "00000000-0000-4000-8000-000000000001",
    WEIGHTS: "00000000-0000-4000-8000-000000000002",
}
_DATE = "com.github.apple.coremltools.conversion_date"
_SOURCE = "com.github.apple.coremltools.source"
# They would read a state again after it was written, so that attention saw the current row rounded.
_LEFT_OUT = {"common::canonicalize_inplace_pattern", "common::prefer_state_in_downstream"}


# Known to the converter by the name of the operator, for which it is loaded with this module.
@register_torch_op(torch_alias=["gemma4::shift_scale"])
def _gemma4_shift_scale(context: Any, node: Any) -> None:
    """Keep codes and steps as they are stored: the device expands them."""
    codes, steps = _get_inputs(context, node, expected=2)
    weight = Builder.constexpr_blockwise_shift_scale(
        data=codes.val.astype(types.np_int4_dtype), scale=steps.val.astype(np.float32), name=node.name
    )
    context.add(weight)


@register_torch_op(torch_alias=["gemma4::gelu_tanh"])
def _gemma4_gelu_tanh(context: Any, node: Any) -> None:
    (x,) = _get_inputs(context, node, expected=1)
    context.add(Builder.gelu(x=x, mode="TANH_APPROXIMATION", name=node.name))


def convert(program: torch.export.ExportedProgram, spec: FunctionSpec, package: Path) -> None:
    """Write the package; its name ends in `.mlpackage`. All but the states is computed in float32."""
    pipeline = coremltools.PassPipeline.DEFAULT
    pipeline.remove_passes(_LEFT_OUT)
    states = [
        coremltools.StateType(
            coremltools.TensorType(shape=state.shape, dtype=np.dtype(state.dtype)), name=name
        )
        for name, state in spec.states.items()
    ]
    outputs = [
        coremltools.TensorType(name=name, dtype=np.dtype(tensor.dtype))
        for name, tensor in spec.outputs.items()
    ]
    coremltools.convert(
        program,
        states=states,
        outputs=outputs,
        convert_to="mlprogram",
        minimum_deployment_target=coremltools.target.iOS18,
        compute_precision=coremltools.precision.FLOAT32,
        pass_pipeline=pipeline,
        skip_model_load=True,
        package_dir=str(package),
    )
    _make_repeatable(package)


def _make_repeatable(package: Path) -> None:
    """Take out what differs between two runs or hosts: the date, how torch was built, random identifiers."""
    path = package / "Data" / MODEL
    model = coremltools.proto.Model_pb2.Model.FromString(path.read_bytes())
    said = model.description.metadata.userDefined
    said.pop(_DATE, None)
    said[_SOURCE] = said[_SOURCE].partition("+")[0]
    write_atomic(path, model.SerializeToString(deterministic=True))
    manifest = json.loads((package / "Manifest.json").read_text(encoding="utf-8"))
    entries = {entry["path"]: entry for entry in manifest["itemInfoEntries"].values()}
    if entries.keys() != _IDENTIFIERS.keys():
        raise UserError(
            f"the package has the items {', '.join(sorted(entries))}, not those of coremltools 9.0"
        )
    manifest["itemInfoEntries"] = {_IDENTIFIERS[path]: entry for path, entry in entries.items()}
    manifest["rootModelIdentifier"] = _IDENTIFIERS[MODEL]
    write_json(package / "Manifest.json", manifest)
