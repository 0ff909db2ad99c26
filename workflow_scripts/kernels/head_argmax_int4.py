"""Binding of `head_argmax_int4.metal`: the best token of every tile of 8, the embedding as 4-bit palette codes."""

import torch
from coreai_torch import TorchMetalKernel

from workflow_scripts.closure import data_file
from workflow_scripts.kernels.binding import THREAD_PARAMETERS, KernelHead, packed_matrix
from workflow_scripts.kernels.reference import partial_argmax
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.scratch import Scratch

BITS = 4


def reference(
    hidden: torch.Tensor, words: torch.Tensor, codebook: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [1, 1, K], words int32 [N, K / 8], codebook float16 [N / 32, 16] -> float32 and int32 [N / 8]."""
    return partial_argmax(hidden, words, codebook, BITS)


KERNEL = TorchMetalKernel(
    name="head_argmax_int4",
    input_names=["X", "W", "CODEBOOK"],
    result_names=["PARTIAL_VALUES", "PARTIAL_INDICES"],
    src=data_file(__file__, "head_argmax_int4.metal").read_text(encoding="utf-8"),
    torch_defn=reference,
    metal_params=THREAD_PARAMETERS,
)


def head(weights: Weights, name: str, scratch: Scratch) -> KernelHead:
    """The head over an artifact's 4-bit palette. Raises UserError where the matrix does not suit."""
    return KernelHead(KERNEL, packed_matrix(weights, name, BITS, scratch))
