"""Gate `coreml_numbers`: what the Core ML reference computes, over the ids its head kept.

It compares with the reference of its recipe and tables, at the same positions and ids. Linux has no Core ML: the stored
program is computed in numpy, operator by operator, so that what the converter did is judged. What is left for a Mac is
Core ML's own compiler and arithmetic, the gate `coreml_prediction`.

Bound: all is float32 but the states, whose values are rounded to float16 once, when they are written. So of each layer
that attends over them the scores and the mix carry one relative error of variance u^2/3 at most, u = 2^-11, and errors
add up as `bounds` says. With the states in float32, too, nothing of that is left: the bound is that of float32.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.coreml import run
from workflow_scripts.coreml.contents import PACKAGE
from workflow_scripts.coreml.pruned_head import read_head_rows
from workflow_scripts.gates import bounds
from workflow_scripts.gates.decode_numbers import DecodeEvidence, largest_head_norm
from workflow_scripts.gates.numbers import Evidence, compare, compare_choice
from workflow_scripts.gates.state_numbers import check_beyond_the_window
from workflow_scripts.gates.verdict import Verdict

_ROUNDED = 2  # keys and values


def gate_coreml_numbers(verdict: Verdict, folder: Path, evidence: DecodeEvidence, context: int) -> None:
    """Logits of every dialogue with numbers, as far as the caches go: with float32 states, and as it ships."""
    ids = dialogue_ids(verdict, evidence, context)
    package, tables = str(folder / f"{folder.name}{PACKAGE}"), str(evidence.tables)
    rows = read_head_rows(folder)
    limits = {"float32": dict.fromkeys(ids, bounds.FP32_LOGITS), "float16": state_bounds(evidence, ids)}
    kept = kept_logits(evidence, rows, ids)
    found = isolated(run.compute, package=package, tables=tables, ids=ids, state_dtypes=list(limits))
    for dtype, bound in limits.items():
        for name, expected in kept.items():
            title = f"{name}: logits with {dtype} states against the decode reference"
            compare(verdict, title, found[f"{dtype}.{name}"], expected, bound[name])
    shipped = {name: found[f"float16.{name}"] for name in ids}
    compare_choices(verdict, evidence.recipe, rows, kept, shipped, limits["float16"])


def dialogue_ids(verdict: Verdict, evidence: DecodeEvidence, context: int) -> dict[str, list[int]]:
    """Dialogue -> what is fed, as far as the caches go; `check_beyond_the_window` says where the ring must wrap."""
    ids = {one.name: one.fed_ids[:context] for one in evidence.recipe.oracle.with_numbers()}
    check_beyond_the_window(verdict, evidence.recipe.weights.config, map(len, ids.values()))
    return ids


def kept_logits(
    evidence: DecodeEvidence, rows: list[int], ids: Mapping[str, list[int]]
) -> dict[str, np.ndarray]:
    """Dialogue -> the reference's logits [n, rows] of the ids that the head kept."""
    with np.load(evidence.recipe.arrays) as arrays:
        return {name: arrays[f"{name}.logits"][: len(tokens), rows] for name, tokens in ids.items()}


def state_bounds(evidence: DecodeEvidence, ids: Mapping[str, list[int]]) -> dict[str, float]:
    """Dialogue -> what float16 states may move a logit by, see the module."""
    hidden, norm = evidence.recipe.hidden(), largest_head_norm(evidence.recipe.weights)
    error = state_error(evidence.recipe.weights.config)
    return {
        name: bounds.logit_bound(error, hidden[name][: len(tokens)], norm) + bounds.FP32_LOGITS
        for name, tokens in ids.items()
    }


def state_error(config: TextConfig) -> float:
    """Relative error of the hidden state from keys and values that are rounded once to float16."""
    return bounds.FP16_ROUNDOFF * (_ROUNDED * config.num_hidden_layers / 3) ** 0.5


def compare_choices(
    verdict: Verdict,
    evidence: Evidence,
    rows: list[int],
    kept: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    limits: Mapping[str, float],
) -> None:
    """The best id among the kept ones, where the reference's choice is clear.

    `rows` are their ids; `kept` the reference's logits of them, `found` the package's, `limits` what it may be off by.
    """
    ids = np.array(rows)
    for name, expected in kept.items():
        if found[name].shape != expected.shape:
            verdict.check(f"{name}: shape", False, str(expected.shape), str(found[name].shape))
            continue
        over_all = np.full((len(expected), evidence.weights.config.vocab_size), -np.inf, np.float32)
        over_all[:, ids] = expected
        chosen = ids[found[name].argmax(axis=1)]
        compare_choice(verdict, evidence.oracle.dialogues[name], chosen, over_all, limits[name])
