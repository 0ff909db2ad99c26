"""The host's side of the graph forms with states, in numpy: positions, masks, growing caches, tables.

The same few lines stand in an app's engine. A host drives a `Program`: a loaded bundle, or the torch modules of one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec, TensorSpec, ring_capacities, ring_function
from workflow_scripts.progress import working
from workflow_scripts.tables.dump import Tables

MASKED = -1e4  # finite in float16
_MAIN, _STEP = "main", "step"


class Placed(Protocol):
    """An array in the memory of a program; a call may change it."""

    def numpy(self) -> np.ndarray:
        """Its content."""


class Program(Protocol):
    """What `runtime.Bundle` offers."""

    @property
    def functions(self) -> list[str]:
        """Names."""

    def spec(self, function: str) -> FunctionSpec:
        """Inputs, outputs and states."""

    def place(self, array: np.ndarray) -> Any:
        """A `Placed` copy of an array."""

    def call(
        self, function: str, inputs: Mapping[str, Any], states: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Run a function; it changes the states in place."""


class States:
    """The kv_cache of one conversation. It starts as zeros; its columns can become more."""

    def __init__(self, program: Program, spec: FunctionSpec, columns: int) -> None:
        self.columns = columns
        self._program = program
        self.arrays = {
            name: program.place(np.zeros(state.sized(columns), state.dtype))
            for name, state in spec.states.items()
        }

    def grow(self, spec: FunctionSpec, columns: int) -> None:
        """Copy what is there into states of `columns` columns, of the shapes of `spec`."""
        for name, state in spec.states.items():
            old, shape = self.arrays[name].numpy(), state.sized(columns)
            if old.shape != shape:
                new = np.zeros(shape, state.dtype)
                new[:, :, :, : old.shape[3]] = old
                self.arrays[name] = self._program.place(new)
        self.columns = columns


TokenInputs = Callable[[int], dict[str, Any]]
"""Token id -> the inputs of `decode` or `decode_tbl` that the per-layer table gives."""


def token_rows(program: Program, tables: Tables) -> TokenInputs:
    """For `decode`: the row of the current token."""
    dtype = program.spec(_MAIN).inputs["ple_tokens"].dtype

    def inputs(token: int) -> dict[str, Any]:
        return {"ple_tokens": tables.token_part(np.array([token]))[None].astype(dtype)}

    return inputs


def whole_table(program: Program, tables: Tables) -> TokenInputs:
    """For `decode_tbl` and `decode_ring`: all rows, placed once.

    Raises UserError where the program takes a table of another layout or size.
    """
    arrays, inputs = tables.per_layer_arrays(), program.spec(program.functions[0]).inputs
    for name, array in arrays.items():
        given, wanted = TensorSpec(array.dtype.name, array.shape), inputs.get(name)
        if given != wanted:
            raise UserError(
                f"the tables have {name} {_said(given)}, the decoder takes {_said(wanted) if wanted else 'none'}: "
                "use the tables that it was made with"
            )
    with working("place the tables"):
        placed = {name: program.place(array) for name, array in arrays.items()}
    return lambda token: placed


class DecodeHost:
    """Forms `decode` and `decode_tbl`: one conversation of at most `context` - 1 tokens (the published bound).

    Its caches have `columns` at first and are doubled, up to `context`, whenever they are full.
    """

    def __init__(self, program: Program, token_inputs: TokenInputs, context: int, columns: int) -> None:
        self.position, self.context = 0, context
        self._program, self._token_inputs = program, token_inputs
        self._spec = program.spec(_MAIN)
        self.states = States(program, self._spec, min(columns, context))

    def step(self, token: int) -> np.ndarray:
        """Feed the next token id; logits [V] float32. Raises UserError past the last position."""
        _refuse_past(self.position, self.context - 1)
        if self.position == self.states.columns:
            self.states.grow(self._spec, min(2 * self.states.columns, self.context))
        self.position += 1
        inputs = {
            "input_ids": np.array([[token]], np.int32),
            "position_ids": np.arange(self.position, dtype=np.int32)[None],
        }
        outputs = self._program.call(_MAIN, inputs | self._token_inputs(token), self.states.arrays)
        return outputs["logits"][0, 0].astype(np.float32)


class RingHost:
    """Form `decode_ring`: starts with the smallest capacity and changes to the next one when it is full."""

    def __init__(self, program: Program, token_inputs: TokenInputs) -> None:
        self.position = 0
        self._program, self._token_inputs = program, token_inputs
        self.capacities = ring_capacities(program.functions)
        smallest = self.capacities[0]
        self.states = States(program, program.spec(ring_function(smallest)), smallest)

    def change_over(self) -> None:
        """Go on in the next larger capacity, whether this one is full or not. Raises UserError where there is none."""
        larger = [capacity for capacity in self.capacities if capacity > self.states.columns]
        if not larger:
            raise UserError(f"{self.states.columns} is the largest capacity")
        self.states.grow(self._program.spec(ring_function(larger[0])), larger[0])

    def step(self, token: int) -> np.ndarray:
        """Feed the next token id; logits [V] float32. Raises UserError past the last position."""
        _refuse_past(self.position, self.capacities[-1])
        if self.position == self.states.columns:
            self.change_over()
        function = ring_function(self.states.columns)
        inputs = {
            "input_ids": np.array([[token]], np.int32),
            "position_ids": np.array([[self.position]], np.int32),
        }
        outputs = self._program.call(function, inputs | self._token_inputs(token), self.states.arrays)
        self.position += 1
        return outputs["logits"][0, 0].astype(np.float32)


class CoreHost:
    """Forms `stateful_core` and `ring_core`: blocks of any size (a ring's: at most its window), caches of `columns`.

    Caches of as many columns as function `step` has can be stepped as well, in any order.
    """

    def __init__(self, program: Program, columns: int) -> None:
        self.position = 0
        self._program, self._spec = program, program.spec(_MAIN)
        self.states = States(program, self._spec, columns)

    def run(self, embeds: np.ndarray, per_layer: np.ndarray) -> np.ndarray:
        """Next S positions: embeds [S, hidden], per_layer [S, layers, ple_dim] -> hidden [S, hidden] float32.

        Raises UserError where the caches have no column for them.
        """
        end = self.position + len(embeds)
        _refuse_past(end - 1, self.states.columns)
        inputs = {
            **_embedded(self._spec, embeds, per_layer),
            "position_ids": np.arange(end, dtype=np.int32)[None],
        }
        outputs = self._program.call(_MAIN, inputs, self.states.arrays)
        self.position = end
        return outputs["hidden"][0].astype(np.float32)

    def step(self, embeds: np.ndarray, per_layer: np.ndarray) -> np.ndarray:
        """The next position by the static function: shapes as for `run`, S is 1."""
        _refuse_past(self.position, self.states.columns)
        inputs = {
            **_embedded(self._spec, embeds, per_layer),
            "position_ids": np.array([[self.position]], np.int32),
        }
        outputs = self._program.call(_STEP, inputs, self.states.arrays)
        self.position += 1
        return outputs["hidden"][0].astype(np.float32)


class BlendHost:
    """Form `blend_core`: one position at a time; the host says which column is written and which are seen."""

    def __init__(self, program: Program, sliding_window: int) -> None:
        self.position = 0
        self._program, self._spec, self._window = program, program.spec(_MAIN), sliding_window
        self._mask = self._spec.inputs["write_mask"]
        self.states = States(program, self._spec, self._mask.shape[-1])

    def run(self, embeds: np.ndarray, per_layer: np.ndarray) -> np.ndarray:
        """The next position: embeds [1, hidden], per_layer [1, layers, ple_dim] -> hidden [1, hidden] float32."""
        _refuse_past(self.position, self.states.columns)
        write = np.zeros(self._mask.shape, self._mask.dtype)
        write[..., self.position] = 1
        inputs = {
            **_embedded(self._spec, embeds, per_layer),
            "position_ids": np.array([[self.position]], np.int32),
            "write_mask": write,
            "causal_mask_full": self._visible(0),
            "causal_mask_sliding": self._visible(max(0, self.position - self._window + 1)),
        }
        outputs = self._program.call(_MAIN, inputs, self.states.arrays)
        self.position += 1
        return outputs["hidden"][0].astype(np.float32)

    def _visible(self, first: int) -> np.ndarray:
        mask = np.full(self._mask.shape, MASKED, self._mask.dtype)
        mask[..., first : self.position + 1] = 0
        return mask


def _embedded(spec: FunctionSpec, embeds: np.ndarray, per_layer: np.ndarray) -> dict[str, np.ndarray]:
    dtype = spec.inputs["inputs_embeds"].dtype
    return {
        "inputs_embeds": embeds[None].astype(dtype),
        "per_layer_inputs": per_layer[None].astype(dtype),
    }


def _said(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _refuse_past(position: int, positions: int) -> None:
    if position >= positions:
        raise UserError(
            f"the conversation is longer than the {positions} positions that there is room for: "
            "start a new one, or export with a larger context"
        )
