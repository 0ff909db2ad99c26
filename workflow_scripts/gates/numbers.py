"""Gate `numbers`: a bundle's outputs against independent float32 numbers, position by position.

A core is compared with the reference of its recipe (same stored weights, torch, float32); the recipe `fp32` also
with the oracle, which closes the chain to the original model. Heads are compared with numpy, those of partial maxima
tile by tile, and front ends with the raw tables.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates import bounds, runs
from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.kernels.partials import TILE_ROWS, chosen_token
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.signature import COMPUTE_DTYPES
from workflow_scripts.quantize.weights import Matrix, Weights
from workflow_scripts.tables.raw import RawTables

# A float16 output is rounded once, to the nearest. Behind it is a float32 sum of hidden_size products that a norm
# brings to size 1: six standard deviations of `bounds`, with 2^-24 for u, are 5.7e-6 for E2B and 7.4e-6 for E4B.
_FRONTEND_RELATIVE = {"fp16": bounds.FP16_ROUNDOFF, "fp32": 0.0}
_FRONTEND_ABSOLUTE = 1e-5
CORE_ERRORS = {"hostcache_core": bounds.core_error, "hostcache_metal": bounds.metal_core_error}
"""Graph form of a core -> relative error of its hidden state in float16."""
# Positions at which an argmax head must be judged, as many as the published bundles were: fewer are no evidence, and a
# dialogue has no more than its length.
_CLEAR_CHOICES = 8


@dataclass(frozen=True)
class Evidence:
    """What a bundle is compared with: the oracle, its recipe's weights, and the result of stage `reference`."""

    oracle: Oracle
    weights: Weights
    reference: Path

    @classmethod
    def open(cls, inputs: Mapping[str, Path]) -> Self:
        """The results `oracle`, `weights` and `reference`."""
        oracle, weights = Oracle.open(inputs["oracle"]), Weights.open(inputs["weights"])
        return cls(oracle, weights, inputs["reference"])

    @property
    def arrays(self) -> Path:
        """The reference's arrays (.npz)."""
        return self.reference / "measured.npz"

    def hidden(self) -> dict[str, np.ndarray]:
        """The reference's hidden rows [n, H] float32 of every dialogue with numbers."""
        with np.load(self.arrays) as arrays:
            return {
                dialogue.name: arrays[f"{dialogue.name}.hidden"] for dialogue in self.oracle.with_numbers()
            }


def check_evidence(verdict: Verdict, evidence: Evidence) -> bool:
    """Is there a dialogue to compare, and do oracle, weights and reference speak of one checkpoint and recipe?"""
    record = json.loads((evidence.reference / "reference.json").read_text(encoding="utf-8"))
    weights = evidence.weights
    pairs = {
        "dialogues with numbers": (
            "at least one",
            "at least one" if evidence.oracle.with_numbers() else "none",
        ),
        "checkpoint of the oracle": (weights.checkpoint_digest, evidence.oracle.checkpoint_digest),
        "checkpoint of the reference": (weights.checkpoint_digest, record["checkpoint"]),
        "recipe of the reference": (weights.recipe, record["recipe"]),
    }
    for name, (expected, found) in pairs.items():
        verdict.check(name, expected == found, expected[:16], found[:16])
    return all(expected == found for expected, found in pairs.values())


def gate_core(
    verdict: Verdict, bundle: Path, evidence: Evidence, form: str, compute: str, context: int
) -> None:
    """Hidden states of every dialogue with numbers, seen as logits."""
    config, exact = evidence.weights.config, evidence.hidden()
    hidden = isolated(
        runs.run_core,
        bundle=str(bundle),
        arrays=str(evidence.arrays),
        dialogues=list(exact),
        sliding_window=config.sliding_window,
    )
    head = evidence.weights.linear(HEAD_WEIGHT)
    logits, norm = project(head, hidden, config.final_logit_softcapping)
    for name, found in logits.items():
        with np.load(evidence.arrays) as arrays:
            expected = arrays[f"{name}.logits"]
        bound = bounds.FP32_LOGITS
        if compute == "fp16":
            error = CORE_ERRORS[form](config, min(context, len(expected)))
            bound = bounds.logit_bound(error, exact[name], norm)
        compare(verdict, f"{name}: logits against the recipe's reference", found, expected, bound)
        if evidence.weights.recipe == "fp32":
            compare(verdict, f"{name}: logits against the oracle", found, evidence.oracle.logits(name), bound)


def gate_head(verdict: Verdict, bundle: Path, evidence: Evidence, form: str, compute: str) -> None:
    """Logits, or the chosen token where the reference's margin exceeds what rounding can move."""
    config, hidden = evidence.weights.config, evidence.hidden()
    output = isolated(runs.run_head, bundle=str(bundle), arrays=str(evidence.arrays), dialogues=list(hidden))
    logits, norm = project(evidence.weights.linear(HEAD_WEIGHT), hidden, config.final_logit_softcapping)
    relative = (bounds.accumulator_error(config.hidden_size) ** 2 + bounds.FP16_ROUNDOFF**2) ** 0.5
    for name, expected in logits.items():
        bound = bounds.logit_bound(relative, hidden[name], norm) if compute == "fp16" else bounds.FP32_LOGITS
        if form == "head":
            compare(verdict, f"{name}: logits", output[name], expected, bound)
        else:
            dialogue = evidence.oracle.dialogues[name]
            compare_choice(verdict, dialogue, output[name].reshape(-1), expected, bound)


def gate_partial_head(verdict: Verdict, bundle: Path, evidence: Evidence, compute: str) -> None:
    """The largest score of every tile of 8 ids, its row, and the token that a host makes of them.

    Both sides get hidden rows in the compute type, so the bound is that of their float32 sums alone.
    """
    hidden = {
        name: rows.astype(COMPUTE_DTYPES[compute]).astype(np.float32)
        for name, rows in evidence.hidden().items()
    }
    output = isolated(
        runs.run_partial_head, bundle=str(bundle), arrays=str(evidence.arrays), dialogues=list(hidden)
    )
    expected, norm = scores(evidence.weights.linear(HEAD_WEIGHT), hidden)
    relative = bounds.metal_score_error(evidence.weights.config.hidden_size)
    for name, rows in expected.items():
        bound = bounds.logit_bound(relative, hidden[name], norm)
        values, indices = output[f"{name}.values"], output[f"{name}.indices"]
        compare_partials(verdict, name, values, indices, rows, bound)
        if values.shape == indices.shape:
            chosen = np.array([chosen_token(*row) for row in zip(values, indices, strict=True)])
            compare_choice(verdict, evidence.oracle.dialogues[name], chosen, rows, bound)


def gate_frontend(verdict: Verdict, bundle: Path, tables: RawTables, ids: list[int], compute: str) -> None:
    """Both functions on every id that a dialogue uses; only a float16 output is rounded."""
    output = isolated(runs.run_frontend, bundle=str(bundle), ids=ids)
    embeds = tables.embed(np.array(ids))
    # The bundle's own embeddings are the second function's input, so its rounding is not counted twice.
    expected = {
        "inputs_embeds": embeds,
        "per_layer_inputs": tables.per_layer_inputs(np.array(ids), output["inputs_embeds"]),
    }
    for name, values in expected.items():
        excess = np.abs(output[name] - values) - _FRONTEND_RELATIVE[compute] * np.abs(values)
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        verdict.at_most(
            f"{name}: error beyond one {compute} rounding",
            float(excess.max()),
            _FRONTEND_ABSOLUTE,
            f"token {ids[worst[0]]}",
        )


def project(
    head: Matrix, hidden: Mapping[str, np.ndarray], softcap: float
) -> tuple[dict[str, np.ndarray], float]:
    """Hidden rows [n, H] per dialogue -> soft-capped logits [n, V] float32, and the largest norm of a head row."""
    logits, norm = scores(head, hidden)
    for rows in logits.values():  # in place: they may take gigabytes
        np.multiply(np.tanh(np.divide(rows, softcap, out=rows), out=rows), softcap, out=rows)
    return logits, norm


def scores(head: Matrix, hidden: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], float]:
    """Hidden rows [n, H] per dialogue -> their products with all head rows [n, V] float32, and the largest norm.

    All dialogues in one pass over the head [V, H], a block of rows at a time: it has 1.6 GB in float32 for E2B.
    """
    rows = np.concatenate(list(hidden.values()))
    products, norm = np.empty((len(rows), head.shape[0]), np.float32), 0.0
    for block in row_blocks(head.shape):
        weights = head.dequantize(block)
        products[:, block] = rows @ weights.T
        norm = max(norm, bounds.largest_norm(weights))
    ends = np.cumsum([len(values) for values in hidden.values()])[:-1]
    return dict(zip(hidden, np.split(products, ends), strict=True)), norm


def compare(verdict: Verdict, name: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Check the largest difference over all positions [n, V]; NaN fails."""
    if found.shape != expected.shape:
        verdict.check(name, False, f"shape {expected.shape}", f"shape {found.shape}")
        return
    difference = np.abs(found.astype(np.float64) - expected)
    verdict.by_position(name, difference.max(axis=1))
    position, entry = np.unravel_index(np.argmax(difference), difference.shape)  # argmax finds NaN too
    where = (
        f"position {position}, id {entry}, {found[position, entry]:.6g} for {expected[position, entry]:.6g}"
    )
    verdict.at_most(name, float(difference[position, entry]), bound, where)


def compare_partials(
    verdict: Verdict, name: str, values: np.ndarray, indices: np.ndarray, expected: np.ndarray, bound: float
) -> None:
    """Largest score and its id of every tile, both [n, V / 8], against all scores [n, V].

    An id must be of its tile and its score the largest, within twice the bound where that is no clear choice.
    """
    tiles = expected.reshape(len(expected), -1, TILE_ROWS)
    compare(verdict, f"{name}: largest scores of the tiles", values, tiles.max(axis=2), bound)
    wanted = np.arange(tiles.shape[1]) * TILE_ROWS + tiles.argmax(axis=2)
    title, text = f"{name}: ids of the tiles", "the largest score's in every tile"
    if indices.shape != wanted.shape:
        verdict.check(title, False, f"shape {wanted.shape}", f"shape {indices.shape}")
        return
    strange = indices // TILE_ROWS != np.arange(tiles.shape[1])
    at_index = np.take_along_axis(tiles, (indices % TILE_ROWS)[..., None], axis=2)[..., 0]
    wrong = np.argwhere(strange | (tiles.max(axis=2) - at_index > 2 * bound))
    where = text
    if len(wrong):
        place = tuple(wrong[0])
        where = f"id {indices[place]} for {wanted[place]} in tile {place[1]} at position {place[0]}"
    verdict.check(title, not len(wrong), text, where)
    top = np.partition(tiles, -2, axis=2)
    clear = (top[..., -1] - top[..., -2] > 2 * bound).sum(axis=1)
    # Scores of a tile are further apart than 2 * bound (a 1e-4 of their spread) but in a few, or where rows are equal,
    # as those of unused ids may be: where that is half of all, the ids are no evidence.
    title = f"{name}: tiles with a clear choice, at every position"
    verdict.at_least(title, float(clear.min()), tiles.shape[1] / 2)


def compare_choice(
    verdict: Verdict, dialogue: Dialogue, found: np.ndarray, expected: np.ndarray, bound: float
) -> None:
    """The chosen ids [n], except where two of the logits [n, V] lie within twice the bound.

    There must be some left: eight positions, or as many as the dialogue has gated ones.
    """
    top = np.partition(expected, -2, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * bound
    needed = max(1, min(_CLEAR_CHOICES, len(dialogue.gated)))
    verdict.at_least(f"{dialogue.name}: positions with a clear choice", float(clear.sum()), needed)
    wrong = np.flatnonzero(clear & (found != expected.argmax(axis=1)))
    text = "the reference's where the choice is clear"
    where = text
    if wrong.size:
        where = f"id {found[wrong[0]]} for {expected[wrong[0]].argmax()} at position {wrong[0]}"
    verdict.check(f"{dialogue.name}: chosen ids", not wrong.size, text, where)
