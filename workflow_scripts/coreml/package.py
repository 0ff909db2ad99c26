"""Reading a finished `.mlpackage`: its description, and its program with all constants."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import coremltools
import numpy as np
from coremltools.converters.mil.frontend.milproto.load import load

from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec, TensorSpec

FUNCTION = "main"


@dataclass(frozen=True)
class Package:
    """`model` is the specification (protobuf), `function` its only function as coremltools reads it back."""

    model: Any
    function: Any

    @classmethod
    def open(cls, path: Path) -> Self:
        """Raises UserError where it holds no readable program."""
        data = path / "Data" / "com.apple.CoreML"
        try:
            model = coremltools.utils.load_spec(str(data / "model.mlmodel"))
            program = load(model, model.specificationVersion, str(data / "weights"))
            return cls(model, program.functions[FUNCTION])
        except Exception as problem:  # whatever protobuf, the blob's reader or an operator's own checks raise
            raise UserError(f"{path} holds no program that coremltools can read: {problem}") from None

    def interface(self) -> FunctionSpec:
        """Names, shapes and types that the package tells a host."""
        description = self.model.description
        return FunctionSpec(
            {entry.name: _tensor(entry.type.multiArrayType) for entry in description.input},
            {entry.name: _tensor(entry.type.multiArrayType) for entry in description.output},
            {entry.name: _tensor(entry.type.stateType.arrayType) for entry in description.state},
        )

    def matrices(self) -> list[tuple[np.ndarray, np.ndarray, str]]:
        """Codes int8 [N, K], steps [N, K / block] and the codes' stored type, of every matrix that a call expands."""
        return [
            (np.asarray(op.data.val), np.asarray(op.scale.val), _type_name(op.data))
            for op in self.function.operations
            if op.op_type == "constexpr_blockwise_shift_scale"
        ]

    def constants(self) -> dict[str, np.ndarray]:
        """Name -> value of every other constant that is an array."""
        taken = {
            var.name
            for op in self.function.operations
            if op.op_type == "constexpr_blockwise_shift_scale"
            for var in (op.data, op.scale)
        }
        return {
            op.outputs[0].name: op.outputs[0].val
            for op in self.function.operations
            if op.op_type == "const" and op.outputs[0].name not in taken and np.ndim(op.outputs[0].val)
        }


def _tensor(array: Any) -> TensorSpec:
    name = array.ArrayDataType.Name(array.dataType)
    return TensorSpec(name.lower(), tuple(array.shape))


def _type_name(var: Any) -> str:
    return coremltools.converters.mil.mil.types.builtin_to_string(var.dtype)
