"""Run a finished `.aimodel` on this machine through the Core AI runtime (on Linux: its CPU interpreter)."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import AIModel, NDArray

from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import FunctionSpec, TensorSpec


class Bundle:
    """A loaded bundle; `call` runs one of its functions on numpy arrays."""

    def __init__(self, path: Path, model: AIModel, runner: asyncio.Runner) -> None:
        self._path, self._model, self._runner = path, model, runner
        self._functions: dict[str, Any] = {}

    @property
    def functions(self) -> list[str]:
        """Names of the bundle's functions, sorted."""
        return sorted(self._model.function_names)

    def spec(self, function: str) -> FunctionSpec:
        """Names, dtypes and shapes of a function's inputs and outputs."""
        described = self._function(function).desc

        def tensor(descriptor: Any) -> TensorSpec:
            return TensorSpec(descriptor.dtype, tuple(descriptor.shape))

        return FunctionSpec(
            {name: tensor(described.input_descriptor(name)) for name in described.input_names},
            {name: tensor(described.output_descriptor(name)) for name in described.output_names},
        )

    def call(self, function: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run `function`; names, dtypes and shapes must be the bundle's own (UserError names what is not)."""
        loaded = self._function(function)
        expected = set(loaded.desc.input_names)
        if expected != inputs.keys():
            raise UserError(
                f"{self._path.name}: function {function} takes {sorted(expected)}, not {sorted(inputs)}"
            )
        arrays = {name: NDArray(np.ascontiguousarray(value)) for name, value in inputs.items()}
        try:
            outputs = self._runner.run(loaded(arrays))
        except (RuntimeError, ValueError, TypeError) as problem:
            raise UserError(f"{self._path.name}: function {function} failed: {problem}") from problem
        # Copies: numpy() gives views into memory that belongs to the runtime.
        return {name: value.numpy().copy() for name, value in outputs.items()}

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            if name not in self._model.function_names:
                raise UserError(
                    f"{self._path.name} has no function {name}: it has {self._model.function_names}"
                )
            self._functions[name] = self._model.load_function(name)
        return self._functions[name]


@contextmanager
def open_bundle(path: Path) -> Iterator[Bundle]:
    """Load a bundle for the time of the block. A damaged program may abort the process: see `child`."""
    if not (path / "main.mlirb").is_file():
        raise UserError(f"{path} is no .aimodel folder: it has no main.mlirb")
    with asyncio.Runner() as runner:
        context = AIModelAsset.load(path).executable()
        model = runner.run(context.__aenter__())
        try:
            yield Bundle(path, model, runner)
        finally:
            runner.run(context.__aexit__(None, None, None))
