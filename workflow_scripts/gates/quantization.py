"""Gate `quantization`: how far a recipe's weights are from the checkpoint, apart from any bundle.

The recipe's reference (torch, float32, stored weights) must choose the oracle's token at every gated position, and
by a safe margin; every tensor must reach the recipe's signal-to-noise floor.
"""

import json
from pathlib import Path

import numpy as np

from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.quantize.recipes import get_recipe


def gate_quantization(verdict: Verdict, oracle: Oracle, weights: Path, reference: Path, recipe: str) -> None:
    """`weights` is the weights result, `reference` its reference arrays (.npz)."""
    tensors = json.loads((weights / "report.json").read_text(encoding="utf-8"))["tensors"]
    noisy = {name: entry["snr_db"] for name, entry in tensors.items() if entry["snr_db"] is not None}
    verdict.check("tensors in the quality report", bool(tensors), "some", "some" if tensors else "none")
    if noisy:  # a tensor that is stored exactly has no noise
        worst = min(noisy, key=noisy.__getitem__)
        floor = get_recipe(recipe).snr_floor_db
        verdict.at_least("least SNR of a tensor, dB", noisy[worst], floor, worst)
    for dialogue in oracle.with_numbers():
        with np.load(reference) as arrays:
            found = arrays[f"{dialogue.name}.logits"]
        expected = oracle.logits(dialogue.name)
        rows = [dialogue.position_of(index) for index in dialogue.gated]
        chosen = found[rows].argmax(axis=1)
        wanted = np.array(dialogue.output_ids)[dialogue.gated]
        wrong = np.flatnonzero(chosen != wanted)
        detail = f"{len(wanted) - wrong.size}/{len(wanted)}"
        if wrong.size:
            detail += f", first at position {rows[wrong[0]]}: {chosen[wrong[0]]} for {wanted[wrong[0]]}"
        verdict.check(f"{dialogue.name}: tokens", not wrong.size, f"{len(wanted)}/{len(wanted)}", detail)
        answers = np.abs(found[rows] - expected[rows]).max()
        verdict.measured[f"{dialogue.name}: largest logit error, answer"] = float(answers)
        verdict.measured[f"{dialogue.name}: largest logit error, all"] = float(np.abs(found - expected).max())
