"""Rotary inverse frequencies, apart from torch: bundles store them, and gates look for them by content."""

from decimal import Decimal

import numpy as np

from workflow_scripts.checkpoint.text_config import RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """theta^(-2i / head_dim) for the pairs i that are rotated, 0 (the identity) for the others; float32 [head_dim/2].

    `proportional` rotates only the first `partial_rotary_factor` of the pairs; its exponents are still divided by
    the whole head_dim. In decimal arithmetic: these numbers are stored in bundles, and the last bit of torch's pow
    depends on the processor's vector units (measured at head_dim 256 and 512).
    Source: HF transformers, modeling_rope_utils.py (`default`, `proportional`).
    """
    rotated = int(rope.partial_rotary_factor * head_dim) // 2
    theta, size = Decimal(rope.theta), Decimal(head_dim)
    frequencies = np.zeros(head_dim // 2, np.float32)
    frequencies[:rotated] = [float(theta ** (-Decimal(2 * pair) / size)) for pair in range(rotated)]
    return frequencies
