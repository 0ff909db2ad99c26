"""Gate `quantization`: how far a recipe's weights are from the checkpoint, apart from any bundle.

Every tensor is compared anew with the checkpoint: its signal-to-noise ratio must reach the recipe's floor and be
what the quality report says, which the writer of the weights made. The recipe's reference (torch, float32, stored
weights) must choose the oracle's token at every gated position by the margin that the oracle itself had to have.
"""

import json
import math
from pathlib import Path

import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.blocks import row_blocks
from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.progress import track
from workflow_scripts.quantize.recipes import Recipe
from workflow_scripts.quantize.weights import Weights

# The report is rounded to 0.01 dB, and sums in another order differ by far less than that.
_REPORT_TOLERANCE_DB = 0.05


def gate_tensors(verdict: Verdict, checkpoint: Checkpoint, weights: Weights, recipe: Recipe) -> None:
    """The stored weights, tensor by tensor: all there, vectors equal, matrices as good as recipe and report say."""
    verdict.check("recipe", weights.recipe == recipe.name, recipe.name, weights.recipe)
    _check_origin(verdict, checkpoint, weights)
    _check_vectors(verdict, checkpoint, weights)
    ratios = _ratios(checkpoint, weights)
    noisy = {name: ratio for name, ratio in ratios.items() if ratio != math.inf}
    if noisy:  # a tensor that is stored exactly has no noise
        worst = min(noisy, key=lambda name: (not math.isnan(noisy[name]), noisy[name]))
        verdict.at_least("least SNR of a tensor, dB", noisy[worst], recipe.snr_floor_db, worst)
    _check_report(verdict, weights.tree / "report.json", ratios)


def _check_origin(verdict: Verdict, checkpoint: Checkpoint, weights: Weights) -> None:
    digests = checkpoint.digest, weights.checkpoint_digest
    verdict.check("checkpoint of the weights", digests[0] == digests[1], digests[0][:12], digests[1][:12])
    layers = {name for name in checkpoint.names() if name.startswith("layers.")}
    expected = {name: checkpoint.shape(name) for name in layers | {"norm.weight", HEAD_WEIGHT}}
    found = {name: tuple(entry["shape"]) for name, entry in weights.index.items()}
    wrong = sorted(dict(expected.items() ^ found.items()))
    text = f"{len(expected)} with their shapes"
    verdict.check("tensors of the checkpoint", not wrong, text, f"another {wrong[0]}" if wrong else text)


def _check_vectors(verdict: Verdict, checkpoint: Checkpoint, weights: Weights) -> None:
    names = [name for name, entry in weights.index.items() if entry["kind"] == "vector"]
    wrong = [name for name in names if not np.array_equal(checkpoint.float32(name), weights.vector(name))]
    verdict.check(f"{len(names)} vectors", not wrong, "equal", f"another {wrong[0]}" if wrong else "equal")


def _ratios(checkpoint: Checkpoint, weights: Weights) -> dict[str, float]:
    """SNR in dB of every matrix; infinite where it is stored exactly."""
    names = [name for name, entry in weights.index.items() if entry["kind"] != "vector"]
    return {name: signal_to_noise(checkpoint, weights, name) for name in track(names, "quality", len(names))}


def signal_to_noise(checkpoint: Checkpoint, weights: Weights, name: str) -> float:
    """SNR in dB of a stored matrix against the checkpoint's, in float64 and blocks of rows."""
    stored, signal, noise = weights.linear(name), 0.0, 0.0
    for rows in row_blocks(checkpoint.shape(name)):
        original = checkpoint.float32(name, rows).astype(np.float64)
        signal += float(np.square(original).sum())
        noise += float(np.square(original - stored.dequantize(rows)).sum())
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _check_report(verdict: Verdict, path: Path, ratios: dict[str, float]) -> None:
    """The report's figure for each matrix is the one found here (null: exact)."""
    figures = json.loads(path.read_text(encoding="utf-8"))["tensors"]
    said = {
        name: math.inf if figures[name]["snr_db"] is None else figures[name]["snr_db"] for name in figures
    }
    missing = sorted(ratios.keys() ^ said.keys())
    wrong = [
        name
        for name in sorted(ratios.keys() & said.keys())
        if not (ratios[name] == said[name] or abs(ratios[name] - said[name]) <= _REPORT_TOLERANCE_DB)
    ]
    if missing:
        found = f"{missing[0]} is in one of the two only"
    else:
        found = f"{wrong[0]}: {said[wrong[0]]} dB, measured {ratios[wrong[0]]:.2f}" if wrong else "equal"
    verdict.check("quality report against the stored weights", found == "equal", "equal", found)


def gate_answers(verdict: Verdict, oracle: Oracle, reference: Path, min_margin: float) -> None:
    """The reference's arrays (.npz) against the oracle, at every gated position of every dialogue with numbers."""
    dialogues = oracle.with_numbers()
    if not dialogues:
        verdict.check("dialogues with numbers", False, "at least one", "none")
    for dialogue in dialogues:
        if not dialogue.gated:
            verdict.check(f"{dialogue.name}: gated positions", False, "at least one", "none")
            continue
        with np.load(reference) as arrays:
            found = arrays[f"{dialogue.name}.logits"]
        _check_answer(verdict, dialogue, found, oracle.logits(dialogue.name), min_margin)


def _check_answer(
    verdict: Verdict, dialogue: Dialogue, found: np.ndarray, expected: np.ndarray, min_margin: float
) -> None:
    """`found` and `expected` are logits [positions, vocab]."""
    rows = [dialogue.position_of(index) for index in dialogue.gated]
    wanted = np.array(dialogue.output_ids)[dialogue.gated]
    chosen = found[rows].argmax(axis=1)
    wrong = np.flatnonzero(chosen != wanted)
    detail = f"{len(wanted) - wrong.size}/{len(wanted)}"
    if wrong.size:
        detail += f", first at position {rows[wrong[0]]}: {chosen[wrong[0]]} for {wanted[wrong[0]]}"
    verdict.check(f"{dialogue.name}: tokens", not wrong.size, f"{len(wanted)}/{len(wanted)}", detail)
    margins = margins_of(found[rows], wanted)
    closest = int(np.argmin(margins))
    verdict.at_least(
        f"{dialogue.name}: least margin", margins[closest], min_margin, f"position {rows[closest]}"
    )
    verdict.measured[f"{dialogue.name}: largest logit error, answer"] = float(
        np.abs(found[rows] - expected[rows]).max()
    )
    verdict.measured[f"{dialogue.name}: largest logit error, all"] = float(np.abs(found - expected).max())


def margins_of(logits: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """By how much the wanted id [n] is above the best other one in each row of logits [n, V]; below 0 if it is not."""
    rows = np.arange(len(wanted))
    others = logits.copy()
    others[rows, wanted] = -np.inf
    return logits[rows, wanted] - others.max(axis=1)
