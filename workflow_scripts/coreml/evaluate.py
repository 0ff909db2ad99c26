"""A package's program computed in numpy, operator by operator, where there is no Core ML to run it.

What each operator does is what Apple's description of it says (coremltools, converters/mil/mil/ops/defs). Only the
operators of the reference are known; another one is refused by name. Arithmetic is in the types that the program says:
float32, and float16 for what is kept in a state.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workflow_scripts.coreml.package import Package
from workflow_scripts.errors import UserError

_Inputs = dict[str, Any]
_TYPES = {"fp32": "float32", "int32": "int32", "bool": "bool"}


class Evaluator:
    """Runs calls one after the other; `states` [name] are arrays, zero at first.

    `state_dtype` is what every float16 of the program is computed in: float32 for the like of a program whose states
    are not rounded, and which has nothing else in float16.
    """

    def __init__(self, package: Package, state_dtype: str = "float16") -> None:
        self._function, self._half = package.function, np.dtype(state_dtype)
        self._constants = {
            op.outputs[0].name: op.outputs[0].val
            for op in package.function.operations
            if op.op_type == "const"
        }
        unknown = {op.op_type for op in package.function.operations} - _OPERATORS.keys() - _HERE
        if unknown:
            raise UserError(
                f"the program has operators that cannot be computed here: {', '.join(sorted(unknown))}"
            )
        self.states = {
            name: np.zeros(tensor.shape, self._half) for name, tensor in package.interface().states.items()
        }

    def call(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One call: input name -> array; returns output name -> array, and changes the states."""
        values: dict[str, Any] = {**self._constants, **inputs}

        def value(var: Any) -> Any:
            if isinstance(var, (list, tuple)):
                return [value(one) for one in var]
            return values[var.name]

        for op in self._function.operations:
            if op.op_type == "const":
                continue
            if op.op_type == "read_state":
                found = (self.states[op.input.name].copy(),)
            elif op.op_type == "coreml_update_state":
                found = (value(op.value),)
                self.states[op.state.name] = found[0]
            elif op.op_type == "cast":
                found = (np.asarray(value(op.x)).astype(self._type(op.dtype.val)),)
            else:
                found = _OPERATORS[op.op_type]({name: value(var) for name, var in op.inputs.items()})
            for var, array in zip(op.outputs, found, strict=True):
                if np.shape(array) != tuple(var.shape):
                    raise UserError(
                        f"operator {op.name} gives shape {np.shape(array)}, the program says {var.shape}"
                    )
                values[var.name] = array
        return {var.name: values[var.name] for var in self._function.outputs}

    def _type(self, name: str) -> np.dtype:
        return self._half if name == "fp16" else np.dtype(_TYPES[name])


_HERE = {"const", "read_state", "coreml_update_state", "cast"}


def _single(function: Callable[[_Inputs], Any]) -> Callable[[_Inputs], tuple[Any, ...]]:
    return lambda inputs: (function(inputs),)


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[_Inputs], tuple[Any, ...]]:
    return _single(lambda inputs: function(inputs["x"], inputs["y"]))


def _unary(function: Callable[[Any], Any]) -> Callable[[_Inputs], tuple[Any, ...]]:
    return _single(lambda inputs: function(inputs["x"]))


def _slice(inputs: _Inputs) -> np.ndarray:
    x, rank = inputs["x"], np.ndim(inputs["x"])
    masks = {name: inputs.get(name) for name in ("begin_mask", "end_mask", "squeeze_mask")}
    masks = {name: [False] * rank if mask is None else mask for name, mask in masks.items()}
    strides = inputs.get("stride")
    index = tuple(
        slice(
            None if masks["begin_mask"][axis] else int(inputs["begin"][axis]),
            None if masks["end_mask"][axis] else int(inputs["end"][axis]),
            1 if strides is None else int(strides[axis]),
        )
        for axis in range(rank)
    )
    return np.squeeze(x[index], tuple(axis for axis in range(rank) if masks["squeeze_mask"][axis]))


def _expand(inputs: _Inputs) -> np.ndarray:
    """Codes times the step of their block."""
    codes, steps = inputs["data"], inputs["scale"]
    if inputs.get("offset") is not None:
        raise UserError("the program has codes with an offset, which the recipe has not")
    block = codes.shape[1] // steps.shape[1]
    return (codes.astype(steps.dtype).reshape(*steps.shape, block) * steps[..., None]).reshape(codes.shape)


def _gelu(inputs: _Inputs) -> np.ndarray:
    if inputs["mode"] != "TANH_APPROXIMATION":
        raise UserError(f"the program has a gelu of mode {inputs['mode']}; Gemma 4 has TANH_APPROXIMATION")
    x = inputs["x"]
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _softmax(inputs: _Inputs) -> np.ndarray:
    x, axis = inputs["x"], int(inputs["axis"])
    grown = np.exp(x - x.max(axis, keepdims=True))
    return grown / grown.sum(axis, keepdims=True)


def _gather(inputs: _Inputs) -> np.ndarray:
    if inputs.get("batch_dims"):
        raise UserError("the program gathers with batch_dims, which the reference does not")
    return np.take(inputs["x"], inputs["indices"], int(inputs["axis"]))


def _matmul(inputs: _Inputs) -> np.ndarray:
    x, y = inputs["x"], inputs["y"]
    x = np.swapaxes(x, -1, -2) if inputs.get("transpose_x") else x
    return x @ (np.swapaxes(y, -1, -2) if inputs.get("transpose_y") else y)


def _linear(inputs: _Inputs) -> np.ndarray:
    bias = inputs.get("bias")
    return inputs["x"] @ inputs["weight"].T + (0 if bias is None else bias)


def _split(inputs: _Inputs) -> tuple[np.ndarray, ...]:
    return tuple(np.split(inputs["x"], np.cumsum(inputs["split_sizes"])[:-1], int(inputs["axis"])))


def _concat(inputs: _Inputs) -> np.ndarray:
    if inputs.get("interleave"):
        raise UserError("the program interleaves a concat, which the reference does not")
    return np.concatenate(inputs["values"], int(inputs["axis"]))


def _mean(inputs: _Inputs) -> np.ndarray:
    axes = tuple(int(axis) for axis in inputs["axes"])
    return inputs["x"].mean(axes, keepdims=bool(inputs["keep_dims"]), dtype=inputs["x"].dtype)


_OPERATORS: dict[str, Callable[[_Inputs], tuple[Any, ...]]] = {
    "add": _binary(np.add),
    "mul": _binary(np.multiply),
    "pow": _binary(np.power),
    "equal": _binary(np.equal),
    "less_equal": _binary(np.less_equal),
    "greater_equal": _binary(np.greater_equal),
    "cos": _unary(np.cos),
    "sin": _unary(np.sin),
    "tanh": _unary(np.tanh),
    "select": _single(lambda inputs: np.where(inputs["cond"], inputs["a"], inputs["b"])),
    "reshape": _single(lambda inputs: np.reshape(inputs["x"], tuple(inputs["shape"]))),
    "transpose": _single(lambda inputs: np.transpose(inputs["x"], tuple(inputs["perm"]))),
    "expand_dims": _single(lambda inputs: np.expand_dims(inputs["x"], tuple(inputs["axes"]))),
    "tile": _single(lambda inputs: np.tile(inputs["x"], tuple(inputs["reps"]))),
    "stack": _single(lambda inputs: np.stack(inputs["values"], int(inputs["axis"]))),
    "slice_by_index": _single(_slice),
    "constexpr_blockwise_shift_scale": _single(_expand),
    "gelu": _single(_gelu),
    "softmax": _single(_softmax),
    "gather": _single(_gather),
    "matmul": _single(_matmul),
    "linear": _single(_linear),
    "concat": _single(_concat),
    "reduce_mean": _single(_mean),
    "split": _split,
}
