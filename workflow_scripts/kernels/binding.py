"""What the bindings share: threads, dispatch, and the graph layers that call a kernel on a packed matrix."""

from dataclasses import dataclass

import torch
from coreai.authoring import MetalParameter
from coreai_torch import TorchMetalKernel
from torch import Tensor, nn

from workflow_scripts.kernels.matrices import kernel_matrix
from workflow_scripts.kernels.packing import GROUP_ROWS, packed_in
from workflow_scripts.kernels.partials import TILE_ROWS
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch

_LANES = 32
_MATVEC_ROWS = 4  # rows of one SIMD-group; the .metal files explain the dispatch

THREAD_PARAMETERS = [
    MetalParameter("lane", "uint", "thread_index_in_simdgroup"),
    MetalParameter("simd_index", "uint", "simdgroup_index_in_threadgroup"),
    MetalParameter("thread_index", "uint", "thread_index_in_threadgroup"),
    MetalParameter("group", "uint3", "threadgroup_position_in_grid"),
]
"""Parameters that every kernel takes beside its tensors."""


@dataclass(frozen=True)
class PackedMatrix:
    """words int32 [N, K * bits / 32] (see `packing`) and codebook float16 [N / 32, 2**bits]."""

    words: Tensor
    codebook: Tensor


def packed_matrix(weights: Weights, name: str, bits: int, scratch: Scratch) -> PackedMatrix:
    """A matrix as a kernel reads it; words that have to be made of codes lie in `scratch`.

    Raises UserError naming it where it does not suit, see `kernel_matrix`.
    """
    palette = kernel_matrix(weights, name, bits)
    words = packed_in(scratch, palette.indices, bits)
    return PackedMatrix(torch.from_numpy(words), torch.from_numpy(palette.codebook))


class _KernelLayer(nn.Module):
    """A kernel with the matrix it reads."""

    def __init__(self, kernel: TorchMetalKernel, matrix: PackedMatrix) -> None:
        super().__init__()
        self.kernel = kernel
        self.register_buffer("words", matrix.words)
        self.register_buffer("codebook", matrix.codebook)


class KernelMatvec(_KernelLayer):
    """y = W x by a palette_matvec kernel."""

    def forward(self, x: Tensor) -> Tensor:
        """[1, 1, K] -> [1, 1, N] in x's type."""
        rows = len(self.words)
        return self.kernel(
            x,
            self.words,
            self.codebook,
            threads_per_grid=(_LANES, rows // _MATVEC_ROWS, 1),
            threads_per_thread_group=(_LANES, GROUP_ROWS // _MATVEC_ROWS, 1),
            result_shapes=[[1, 1, rows]],
        )


class KernelHead(_KernelLayer):
    """Scores and their maxima per tile of 8 rows by a head_argmax kernel."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [1, 1, K] -> partial values float32 [N / 8] and their rows int32 [N / 8]."""
        tiles = len(self.words) // TILE_ROWS
        return self.kernel(
            hidden,
            self.words,
            self.codebook,
            threads_per_grid=(_LANES, tiles, 1),
            threads_per_thread_group=(_LANES, GROUP_ROWS // TILE_ROWS, 1),
            result_shapes=[[tiles], [tiles]],
        )


def kernel_linears(kernel: TorchMetalKernel, weights: Weights, bits: int, scratch: Scratch) -> LinearFactory:
    """Layers that call `kernel` on an artifact's palettes of `bits` bits."""
    return lambda name: KernelMatvec(kernel, packed_matrix(weights, name, bits, scratch))
