"""Gate `numbers`: a bundle's outputs against independent float32 numbers, position by position.

A core is compared with the reference of its recipe (same stored weights, torch, float32); the recipe `fp32` also
with the oracle, which closes the chain to the original model. Heads are compared with numpy, front ends with the
raw tables.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.gates import bounds, runs
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.raw import RawTables

_BLOCK = 8192  # head rows expanded to float32 at a time
# One float16 rounding of the output, and the float32 sum behind it.
_FRONTEND_RELATIVE, _FRONTEND_ABSOLUTE = 2.0**-10, 1e-5


@dataclass(frozen=True)
class Evidence:
    """What a bundle is compared with: the oracle, its recipe's weights, and their reference arrays (.npz)."""

    oracle: Oracle
    weights: Weights
    reference: Path


def gate_core(verdict: Verdict, bundle: Path, evidence: Evidence, compute: str, context: int) -> None:
    """Hidden states of every dialogue with numbers, seen as logits."""
    config = evidence.weights.config
    head = evidence.weights.linear(HEAD_WEIGHT).dequantize()
    names = [dialogue.name for dialogue in evidence.oracle.with_numbers()]
    hidden = isolated(
        runs.run_core,
        bundle=str(bundle),
        arrays=str(evidence.reference),
        dialogues=names,
        sliding_window=config.sliding_window,
    )
    for name in names:
        found = softcapped(hidden[name], head, config.final_logit_softcapping)
        with np.load(evidence.reference) as arrays:
            expected, exact = arrays[f"{name}.logits"], arrays[f"{name}.hidden"]
        bound = bounds.FP32_LOGITS
        if compute == "fp16":
            bound = bounds.logit_bound(bounds.core_error(config, min(context, len(exact))), exact, head)
        compare(verdict, f"{name}: logits against the recipe's reference", found, expected, bound)
        if evidence.weights.recipe == "fp32":
            compare(verdict, f"{name}: logits against the oracle", found, evidence.oracle.logits(name), bound)


def gate_head(verdict: Verdict, bundle: Path, evidence: Evidence, form: str, compute: str) -> None:
    """Logits, or the chosen token where the reference's margin exceeds what rounding can move."""
    config, weight = evidence.weights.config, evidence.weights.linear(HEAD_WEIGHT)
    head = weight.dequantize()
    names = [dialogue.name for dialogue in evidence.oracle.with_numbers()]
    output = isolated(runs.run_head, bundle=str(bundle), arrays=str(evidence.reference), dialogues=names)
    for name in names:
        with np.load(evidence.reference) as arrays:
            hidden = arrays[f"{name}.hidden"]
        expected = softcapped(hidden, head, config.final_logit_softcapping)
        relative = (bounds.accumulator_error(config.hidden_size) ** 2 + bounds.FP16_ROUNDOFF**2) ** 0.5
        bound = bounds.FP32_LOGITS if compute == "fp32" else bounds.logit_bound(relative, hidden, head)
        if form == "head":
            compare(verdict, f"{name}: logits", output[name], expected, bound)
        else:
            _compare_choice(verdict, name, output[name].reshape(-1), expected, bound)


def gate_frontend(verdict: Verdict, bundle: Path, tables: RawTables, ids: list[int]) -> None:
    """Both functions on every id that a dialogue uses."""
    output = isolated(runs.run_frontend, bundle=str(bundle), ids=ids)
    embeds = tables.embed(np.array(ids))
    # The bundle's own embeddings are the second function's input, so its rounding is not counted twice.
    expected = {
        "inputs_embeds": embeds,
        "per_layer_inputs": tables.per_layer_inputs(np.array(ids), output["inputs_embeds"]),
    }
    for name, values in expected.items():
        excess = np.abs(output[name] - values) - _FRONTEND_RELATIVE * np.abs(values)
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        verdict.at_most(
            f"{name}: error beyond one float16 rounding",
            float(excess.max()),
            _FRONTEND_ABSOLUTE,
            f"token {ids[worst[0]]}",
        )


def softcapped(hidden: np.ndarray, head: np.ndarray, softcap: float) -> np.ndarray:
    """hidden [n, H] and head [V, H] float32 -> soft-capped logits [n, V] float32, in blocks of head rows."""
    blocks = [hidden @ head[start : start + _BLOCK].T for start in range(0, len(head), _BLOCK)]
    return np.tanh(np.concatenate(blocks, axis=1) / softcap) * softcap


def compare(verdict: Verdict, name: str, found: np.ndarray, expected: np.ndarray, bound: float) -> None:
    """Check the largest difference over all positions [n, V]; NaN fails."""
    if found.shape != expected.shape:
        verdict.check(name, False, f"shape {expected.shape}", f"shape {found.shape}")
        return
    difference = np.abs(found.astype(np.float64) - expected)
    position, entry = np.unravel_index(np.argmax(difference), difference.shape)  # argmax finds NaN too
    where = (
        f"position {position}, id {entry}, {found[position, entry]:.6g} for {expected[position, entry]:.6g}"
    )
    verdict.at_most(name, float(difference[position, entry]), bound, where)


def _compare_choice(
    verdict: Verdict, name: str, found: np.ndarray, expected: np.ndarray, bound: float
) -> None:
    """The chosen ids, except where two logits lie within twice the bound."""
    top = np.partition(expected, -2, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * bound
    wrong = np.flatnonzero(clear & (found != expected.argmax(axis=1)))
    where = (
        "equal"
        if not wrong.size
        else f"id {found[wrong[0]]} for {expected[wrong[0]].argmax()} at position {wrong[0]}"
    )
    verdict.check(f"{name}: chosen ids", not wrong.size and bool(clear.any()), "equal", where)
    verdict.measured[f"{name}: positions with a clear choice"] = float(clear.sum())
