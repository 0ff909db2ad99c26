"""Run a finished `.aimodel` on this machine through the Core AI runtime (on Linux: its CPU interpreter).

On a host without Metal a bundle with Metal kernels runs as its twin, see `kernel_twin`.
"""

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import AIModel, NDArray, SpecializationOptions

from workflow_scripts.errors import UserError
from workflow_scripts.model.signature import ANY_LENGTH, FunctionSpec, TensorSpec
from workflow_scripts.progress import working

_LOG = logging.getLogger(__name__)


class Bundle:
    """A loaded bundle; `call` runs one of its functions on numpy arrays.

    `kernels` is the number of its Metal kernels that run as their reference operators: 0 where Metal runs them.
    """

    def __init__(self, path: Path, model: AIModel, runner: asyncio.Runner, kernels: int) -> None:
        self.kernels = kernels
        self._path, self._model, self._runner = path, model, runner
        self._functions: dict[str, Any] = {}

    @property
    def functions(self) -> list[str]:
        """Names of the bundle's functions, sorted."""
        return sorted(self._model.function_names)

    def spec(self, function: str) -> FunctionSpec:
        """Names, dtypes and shapes of a function's inputs, outputs and states; -1 is any length."""
        described = self._function(function).desc

        def tensor(descriptor: Any) -> TensorSpec:
            shape = tuple(ANY_LENGTH if size is None else size for size in descriptor.shape)
            return TensorSpec(descriptor.dtype, shape)

        return FunctionSpec(
            {name: tensor(described.input_descriptor(name)) for name in described.input_names},
            {name: tensor(described.output_descriptor(name)) for name in described.output_names},
            {name: tensor(described.state_descriptor(name)) for name in described.state_names},
        )

    def place(self, array: np.ndarray) -> NDArray:
        """A copy of an array in the runtime's memory, for states and for inputs that stay the same from call to call.

        Its `numpy()` gives the content. The copy is slow (0.1 GB/s, measured): not one for each call.
        """
        return NDArray(np.ascontiguousarray(array))

    def call(
        self,
        function: str,
        inputs: Mapping[str, np.ndarray | NDArray],
        states: Mapping[str, NDArray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run `function`; names, dtypes and shapes must be the bundle's own (UserError names what is not).

        `states` are the function's states, made by `place` and kept by the caller: the call changes them in place.
        """
        loaded, states = self._function(function), states or {}
        self._check_names(function, "inputs", loaded.desc.input_names, inputs)
        self._check_names(function, "states", loaded.desc.state_names, states)
        arrays = {
            name: value if isinstance(value, NDArray) else self.place(value) for name, value in inputs.items()
        }
        try:
            outputs = self._runner.run(loaded(arrays, dict(states)))
        except (RuntimeError, ValueError, TypeError) as problem:
            raise UserError(f"{self._path.name}: function {function} failed: {problem}") from problem
        # Copies: numpy() gives views into memory that belongs to the runtime.
        return {name: value.numpy().copy() for name, value in outputs.items()}

    def _check_names(self, function: str, side: str, expected: list[str], given: Mapping[str, Any]) -> None:
        if set(expected) != given.keys():
            raise UserError(
                f"{self._path.name}: function {function} has the {side} {sorted(expected)}, not {sorted(given)}"
            )

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            if name not in self._model.function_names:
                raise UserError(
                    f"{self._path.name} has no function {name}: it has {self._model.function_names}"
                )
            self._functions[name] = self._model.load_function(name)
        return self._functions[name]


@contextmanager
def open_bundle(path: Path, options: SpecializationOptions | None = None) -> Iterator[Bundle]:
    """Load a bundle for the time of the block. A damaged program may abort the process: see `isolated`.

    `options` choose what a Mac runs it on, see `gpu`; without them the runtime chooses.
    Raises UserError for a folder that is no bundle, and for Metal kernels that cannot be replaced on this host.
    """
    if not (path / "main.mlirb").is_file():
        raise UserError(f"{path} is no .aimodel folder: it has no main.mlirb")
    with asyncio.Runner() as runner:
        with working(f"load {path.name}"), _loadable(path) as (folder, kernels):
            context = AIModelAsset.load(folder).executable(options)
            model = runner.run(context.__aenter__())
        try:
            yield Bundle(path, model, runner, kernels)
        finally:
            runner.run(context.__aexit__(None, None, None))


@contextmanager
def _loadable(bundle: Path) -> Iterator[tuple[Path, int]]:
    """A folder that this host's runtime can load, and how many Metal kernels it has replaced.

    A twin's folder is there for the time of the block: a loaded model does not read it again.
    """
    if sys.platform == "darwin":
        yield bundle, 0
        return
    from workflow_scripts.coreai.kernel_twin import build_twin, saved_twin

    twin = build_twin(bundle)
    if not twin.kernels:
        yield bundle, 0
        return
    calls = ", ".join(f"{count} x {name}" for name, count in sorted(Counter(twin.kernels).items()))
    _LOG.info("%s: this host has no Metal, reference operators run in place of %s", bundle.name, calls)
    with saved_twin(twin, bundle) as folder:
        yield folder, len(twin.kernels)
