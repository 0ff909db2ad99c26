"""From a torch module to an `.aimodel` folder, reproducibly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import coreai_torch
import torch
from coreai_torch import TorchConverter, TorchMetalKernel
from torch.export import Dim
from torch.fx import config as fx_config

from workflow_scripts.collection import paused_collection
from workflow_scripts.coreai import private
from workflow_scripts.coreai.packed_codes import PackedOnDisk
from workflow_scripts.model.signature import COMPUTE_DTYPES, FunctionSpec, Length, TensorSpec
from workflow_scripts.progress import Phases
from workflow_scripts.scratch import Scratch


@dataclass(frozen=True)
class Function:
    """One function of a bundle: its name, the module behind it, and the names, dtypes and shapes of its I/O.

    The module takes the inputs and then the states, in order, and writes the states in place.
    """

    name: str
    module: torch.nn.Module
    spec: FunctionSpec

    def example(self) -> tuple[torch.Tensor, ...]:
        """Inputs and states to trace with: only shapes count, so a table of gigabytes is never touched."""
        return tuple(
            torch.empty(spec.traced(), dtype=getattr(torch, spec.dtype)) for spec in self._arguments()
        )

    def dynamic_shapes(self) -> list[dict[int, Any] | None] | None:
        """What torch.export takes: for each input and state its dimensions that may change; None where all are static.

        A list has to fit the names of the module's parameters, which a module of `*tensors` does not tell apart.
        """
        dims = {
            size: Dim(size.name, min=size.lowest, max=size.highest)
            for spec in self._arguments()
            for size in spec.shape
            if isinstance(size, Length)
        }
        if not dims:
            return None
        return [
            {axis: dims[size] for axis, size in enumerate(spec.shape) if isinstance(size, Length)} or None
            for spec in self._arguments()
        ]

    def _arguments(self) -> list[TensorSpec]:
        return [*self.spec.inputs.values(), *self.spec.states.values()]


def torch_dtype(compute: str) -> torch.dtype:
    """The element type of a compute precision, `fp32` or `fp16`."""
    return getattr(torch, COMPUTE_DTYPES[compute])


def save_bundle(
    functions: Sequence[Function],
    out: Path,
    description: dict[str, str],
    kernels: Sequence[TorchMetalKernel] = (),
) -> None:
    """Convert the functions into one program (equal constants are stored once) and write it into `out`.

    `kernels` are the Metal kernels that the functions call. Release mode: debug mode would put absolute source
    paths into the file.
    """
    with (
        private.reproducible_names(),
        private.packing_by(partial(PackedOnDisk, Scratch(out.parent))),
        torch.no_grad(),
        _without_stack_traces(),
        paused_collection(),
    ):
        private.forget_kernel_names(kernels)
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        converter.register_custom_kernels(kernels)
        phases = Phases(3 * len(functions) + 2)
        for function in functions:
            exported = _export(function, phases)
            with phases.next("pack", function.name):
                converter.add_exported_program(
                    exported,
                    input_names=list(function.spec.inputs),
                    state_names=list(function.spec.states),
                    output_names=list(function.spec.outputs),
                    entrypoint_name=function.name,
                )
        with phases.next("convert", ", ".join(function.name for function in functions)):
            program = converter.to_coreai()
    with phases.next("write", out.name, out):
        private.write_asset(program, out, description)


@contextmanager
def _without_stack_traces() -> Iterator[None]:
    """No node of a graph keeps where it was made, which release mode drops: a twentieth of an export's time."""
    stock = fx_config.do_not_emit_stack_traces
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = stock


def _export(function: Function, phases: Phases) -> torch.export.ExportedProgram:
    with phases.next("trace", function.name):
        program = torch.export.export(
            function.module.eval(),
            args=function.example(),
            dynamic_shapes=function.dynamic_shapes(),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    for node in list(program.graph.nodes):
        # Run-time checks of a cast's input type: no use in a converted graph, and a fifth of the decomposition time.
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            program.graph.erase_node(node)
    with phases.next("decompose", f"{function.name}, {len(program.graph.nodes)} nodes"):
        decomposed = program.run_decompositions(coreai_torch.get_decomp_table())
    _refuse_miscompiled(function.name, decomposed)
    return decomposed


def _refuse_miscompiled(function: str, program: torch.export.ExportedProgram) -> None:
    """Stop at what coreai-torch 0.4.3 converts without an error into something else.

    A truncating division of integers that is multiplied again is folded as if it were a real one: 13 // 8 * 8 gives
    13 (measured). A table look-up or the rounding mode `floor` is right.
    """
    for node in program.graph.nodes:
        truncates = node.kwargs.get("rounding_mode") == "trunc"
        if truncates and not node.meta["val"].is_floating_point():
            raise ValueError(
                f"{function}: {node.name} is a truncating integer division, which is miscompiled"
            )
