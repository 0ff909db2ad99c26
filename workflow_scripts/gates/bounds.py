"""Numeric bounds of the gates, each derived; none is fitted to what a bundle happens to give.

float32: logits are soft-capped at 30. Hugging Face's own two float32 paths (cached and whole sequence) differ by 8e-6,
and runtime and torch by up to 1.6e-5 (measured on a tiny model). The derivation below with 2^-24 for u gives 9e-5 for
the tiny model's core and 1.0e-4 for its token decoder, so the bound is 1e-4: far below what any wrong term of the
decoder causes (3 to 8). It does not grow with the model.

float16 in the Linux runtime: a matmul adds its K products one after the other into one float16 accumulator
(measured: 4096 ones sum to 2048). Each addition rounds the partial sum by a relative error of variance at most
u^2/3, u = 2^-11. Partial sums of K random-signed terms grow with the square root, so the summed error is
u * sqrt(K/6) relative to the result. In the decoder every branch is normed before it is added, so a branch
passes on its own relative error and the residual stream collects the branches' errors in quadrature, each weighted
by at most one. A logit is the product of the hidden state with a row e of the embedding; an error of relative
size d in a random direction moves it by d * rms(h) * |e|. Six of these standard deviations are allowed: a normal error
exceeds them once in 5e8, and a dialogue of 300 positions has 8e7 logits of 262144 ids.

Metal kernels (on Linux: their reference operators) sum in float32, where K products cost less than a hundredth of a
float16 rounding up to K = 12288. A kernel of an MLP then rounds once, as do the operators around it; a rounding has
the relative error u and at most the variance u^2/3. A head's partial maxima are not rounded at all. Their partial
sums have whatever sign hidden state and embedding give them, but none can exceed |h| |e| = sqrt(K) rms(h) |e|; K
additions that each round one of that size by the variance of 2^-24 leave 2^-24 * K / sqrt(3), times rms(h) |e|.

A token decoder in float16 makes its per-layer inputs and its logits itself. A per-layer input comes from one more sum
of hidden_size products, and four roundings: of embedding, projection, token part and result; each layer multiplies
its gate by it. The head is a sum of hidden_size products of the rounded hidden state, and rounded itself. A logit lies
within the softcap, so that its own rounding moves it by u times the softcap at most.
"""

from collections.abc import Iterable

import numpy as np

from workflow_scripts.checkpoint.text_config import TextConfig

FP32_LOGITS = 1e-4
FP16_ROUNDOFF = 2.0**-11
FP32_ROUNDOFF = 2.0**-24
_SIGMAS = 6.0
MLP_ROUNDINGS = 6  # of the input, gate, up, gelu, product and down


def accumulator_error(terms: int) -> float:
    """Relative error of one float16 dot product of `terms` products, see the module."""
    return FP16_ROUNDOFF * (terms / 6) ** 0.5


def core_error(config: TextConfig, context: int) -> float:
    """Relative error of the float16 decoder's hidden state where all matrices are multiplied in float16."""
    mlp = [
        length
        for layer in range(config.num_hidden_layers)
        for length in (config.hidden_size, config.hidden_size, config.layer_intermediate_size(layer))
    ]
    lengths = [*_lengths_beside_mlp(config, context), *mlp]
    return _in_quadrature(accumulator_error(length) for length in lengths)


def metal_core_error(config: TextConfig, context: int) -> float:
    """Relative error of the float16 decoder's hidden state where Metal kernels compute the MLPs."""
    roundings = [FP16_ROUNDOFF / 3**0.5] * MLP_ROUNDINGS * config.num_hidden_layers
    lengths = _lengths_beside_mlp(config, context)
    return _in_quadrature([*roundings, *(accumulator_error(length) for length in lengths)])


def decode_error(config: TextConfig, context: int) -> float:
    """Relative error of a float16 token decoder's scores before the softcap, see the module."""
    product = accumulator_error(config.hidden_size)
    rounding = FP16_ROUNDOFF / 3**0.5
    per_layer_input = _in_quadrature([product, *[rounding] * 4])
    head = [product, rounding, rounding]
    errors = [core_error(config, context), *[per_layer_input] * config.num_hidden_layers, *head]
    return _in_quadrature(errors)


def metal_score_error(terms: int) -> float:
    """Relative error of two float32 scores of `terms` products, a kernel's and one to compare with, see the module."""
    return 2**0.5 * FP32_ROUNDOFF * terms / 3**0.5


def _lengths_beside_mlp(config: TextConfig, context: int) -> list[int]:
    """How many products each of the decoder's sums has, without the MLPs'."""
    lengths = []
    for layer in range(config.num_hidden_layers):
        head_dim = config.layer_head_dim(layer)
        window = context if config.layer_types[layer] == "full_attention" else config.sliding_window
        # q, k, v; scores; mix; o | gate; projection. `window` columns at most carry weight.
        lengths += [
            *[config.hidden_size] * 3,
            head_dim,
            window,
            config.num_attention_heads * head_dim,
            config.hidden_size,
            config.hidden_size_per_layer_input,
        ]
    return lengths


def _in_quadrature(errors: Iterable[float]) -> float:
    return sum(error**2 for error in errors) ** 0.5


def largest_norm(rows: np.ndarray) -> float:
    """The largest Euclidean norm of some rows [n, H]; of a whole head matrix it is taken block by block."""
    return float(np.sqrt((rows.astype(np.float64) ** 2).sum(axis=1)).max())


def logit_bound(relative: float, hidden: np.ndarray, head_norm: float) -> float:
    """Bound of a logit's error from a relative error of the hidden rows [n, H] and the largest norm of a head row."""
    rms = float(np.sqrt((hidden.astype(np.float64) ** 2).mean(axis=1)).max())
    # Two significant digits: the bound is part of the release and must not carry a host's last bits.
    return float(f"{_SIGMAS * relative * rms * head_norm:.2g}")
