"""How far the next-id distribution of a set of bundles is from the original model's, position by position.

A token gate sees the first choice alone. The Kullback-Leibler divergence KL(original || set) sees all that a sampler
would, and the choices on the prompt, where no token is gated. Both logits lie within the softcap (30 for Gemma 4), so
that their exponentials, at most 1e13, are summed in float64 as they are, over blocks of ids and without their maximum.

Neighbouring positions of a text are not independent: the interval of their mean is a moving-block bootstrap (Kuensch,
1989), that of the share of equal choices is Wilson's (1927), which is not empty where all are equal. The divergence is
held to its bound by the upper end of the interval, the share as it was found: over the 64 positions of the smallest set
its interval is 0.06 wide even where all are equal.

The bounds are about what a user gets, since a recipe's cost has no derivation: with a divergence of D nats, at most
sqrt(D / 2) of the probability lies elsewhere (Pinsker), and as often a sampler coupled with the original's draws
another id. `LARGEST_SHARE` of the draws are allowed, so that the mean may be 2 * LARGEST_SHARE**2 (the root is concave:
the mean share is at most the root of the mean). The same share of first choices may differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from workflow_scripts.gates.verdict import Verdict

LARGEST_SHARE = 0.1
LARGEST_DIVERGENCE = 2 * LARGEST_SHARE**2  # nats
CONFIDENCE = 0.95
_QUANTILE = 1.959964  # of the normal distribution, for CONFIDENCE
_RESAMPLES = 4000
_SEED = 1

Blocks = Iterable[tuple[np.ndarray, np.ndarray]]
"""Logits [n, ids of the block] of the original and of the set, block by block over all ids."""


@dataclass(frozen=True)
class Divergence:
    """Per position: KL divergence in nats [n] float64, and whether both choose the same id [n]."""

    nats: np.ndarray
    same: np.ndarray


def divergence(blocks: Blocks) -> Divergence:
    """Compare two distributions at every position, see the module."""
    sums: list[np.ndarray] = []
    best: list[tuple[np.ndarray, ...]] = []
    first = 0
    for ours, theirs in blocks:
        original, found = ours.astype(np.float64), theirs.astype(np.float64)
        weights = np.exp(original)
        sums.append(np.stack([weights.sum(1), np.exp(found).sum(1), (weights * (original - found)).sum(1)]))
        best.append((original.max(1), first + original.argmax(1), found.max(1), first + found.argmax(1)))
        first += original.shape[1]
    total_original, total_found, moved = np.sum(sums, axis=0)
    nats = moved / total_original - np.log(total_original) + np.log(total_found)
    ids = [_winner([(b[side], b[side + 1]) for b in best]) for side in (0, 2)]
    return Divergence(nats, ids[0] == ids[1])


def _winner(blocks: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The id of the largest logit at every position; of a tie the lowest, as a host takes it."""
    values, ids = (np.stack(parts) for parts in zip(*blocks, strict=True))
    return np.take_along_axis(ids, values.argmax(0)[None], axis=0)[0]


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Confidence interval of the mean of dependent values [n]: moving blocks of about sqrt(n), with a fixed seed."""
    count = len(values)
    length = max(1, round(count**0.5))
    starts = np.random.default_rng(_SEED).integers(0, count - length + 1, (_RESAMPLES, -(-count // length)))
    sums = np.convolve(values, np.ones(length), "valid")  # of the block that starts at each position
    means = sums[starts].mean(axis=1) / length
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's confidence interval of a share of `count` trials."""
    share, square = hits / count, _QUANTILE**2
    centre = share + square / (2 * count)
    half = _QUANTILE * (share * (1 - share) / count + square / (4 * count**2)) ** 0.5
    return (centre - half) / (1 + square / count), (centre + half) / (1 + square / count)


def gate_divergence(verdict: Verdict, name: str, found: Divergence) -> None:
    """Mean divergence and share of equal choices of one dialogue, see the module."""
    if not np.isfinite(found.nats).all():
        worst = int(np.flatnonzero(~np.isfinite(found.nats))[0])
        verdict.check(f"{name}: KL divergence", False, "a number", f"none at position {worst}")
        return
    verdict.by_position(f"{name}: KL divergence, nats", found.nats)
    low, high = mean_interval(found.nats)
    hits, count = int(found.same.sum()), len(found.same)
    least, most = share_interval(hits, count)
    verdict.at_most(
        f"{name}: KL divergence, upper end of its mean's 95% interval",
        high,
        LARGEST_DIVERGENCE,
        f"largest at position {int(found.nats.argmax())}",
    )
    verdict.at_least(
        f"{name}: top-1 agreement", hits / count, 1 - LARGEST_SHARE, f"{hits} of {count} positions"
    )
    verdict.measured |= {
        f"{name}: KL divergence, mean": float(found.nats.mean()),
        f"{name}: KL divergence, lower end": low,
        f"{name}: KL divergence, largest": float(found.nats.max()),
        f"{name}: top-1 agreement, lower end": least,
        f"{name}: top-1 agreement, upper end": most,
    }
