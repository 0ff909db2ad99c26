"""Binding of `palette_matvec_int8.metal`: y = W x for one token, W as 8-bit palette codes."""

import torch
from coreai_torch import TorchMetalKernel

from workflow_scripts.closure import data_file
from workflow_scripts.kernels.binding import THREAD_PARAMETERS, kernel_linears
from workflow_scripts.kernels.reference import palette_matvec
from workflow_scripts.model.linear import LinearFactory
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch

BITS = 8


def reference(x: torch.Tensor, words: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """x [1, 1, K], words int32 [N, K / 4], codebook float16 [N / 32, 256] -> [1, 1, N] in x's type."""
    return palette_matvec(x, words, codebook, BITS)


KERNEL = TorchMetalKernel(
    name="palette_matvec_int8",
    input_names=["X", "W", "CODEBOOK"],
    result_names=["Y"],
    src=data_file(__file__, "palette_matvec_int8.metal").read_text(encoding="utf-8"),
    torch_defn=reference,
    metal_params=THREAD_PARAMETERS,
)


def linears(weights: Weights, scratch: Scratch) -> LinearFactory:
    """Layers over an artifact of 8-bit palettes. The factory raises UserError naming a matrix that does not suit."""
    return kernel_linears(KERNEL, weights, BITS, scratch)
