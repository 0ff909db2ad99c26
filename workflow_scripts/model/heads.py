"""Heads over the tied embedding matrix: logits with softcap, and the token id itself.

The head multiplies by the raw matrix: the factor sqrt(hidden) belongs to the input side only.
Both take float32 hidden states, as the published heads do.
"""

import torch
from torch import Tensor, nn

from workflow_scripts.model.norm import as_dtype, as_float32


class LogitsHead(nn.Module):
    """hidden [1, 1, hidden] float32 -> logits [1, 1, vocab] float32 = tanh(z / cap) * cap."""

    def __init__(self, lm_head: nn.Module, softcap: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.lm_head, self.softcap, self.dtype = lm_head, softcap, dtype

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        scores = as_float32(self.lm_head(as_dtype(hidden, self.dtype)))
        return torch.tanh(scores / self.softcap) * self.softcap


class ArgmaxHead(nn.Module):
    """hidden [1, 1, hidden] float32 -> token_id [1, 1] int32; no softcap, which is monotonic."""

    def __init__(self, lm_head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.lm_head, self.dtype = lm_head, dtype

    def forward(self, hidden: Tensor) -> Tensor:
        """See the class."""
        return torch.argmax(self.lm_head(as_dtype(hidden, self.dtype)), dim=-1).to(torch.int32)
