"""Gate `quantization`: how far a recipe's weights are from the checkpoint, apart from any bundle.

Every tensor is compared anew with the checkpoint: it must be stored as the recipe says for its kind, every weight with
the code that is nearest to it, palettes with the means of their weights, and with a signal-to-noise ratio that reaches
the floor of that encoding; ratios and sizes must be what the quality report says, which the writer of the weights made.
The recipe's reference (torch, float32, stored weights) must choose the oracle's token at every gated position by the
margin that the oracle itself had to have.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.errors import UserError
from workflow_scripts.gates.oracle import Dialogue, Oracle
from workflow_scripts.gates.stored_codes import beyond_code, kept_to_the_bit, off_means
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.progress import track
from workflow_scripts.quantize.kinds import HEAD, KINDS, matrix_kind
from workflow_scripts.quantize.recipes import (
    DenseEncoding,
    Encoding,
    LinearEncoding,
    PaletteEncoding,
    Recipe,
)
from workflow_scripts.quantize.weights import Dense, Linear, Matrix, Palette, Weights

# The report is rounded to 0.01 dB: half of that, and sums of squares in another order, which differ by less than 1e-9.
_REPORT_TOLERANCE_DB = 0.005 + 1e-6
# On the grid of the training nearly all are: a public re-packing of E2B's with the nearest float16 steps has 96.84%.
_LEAST_KEPT = 0.95


def gate_tensors(verdict: Verdict, checkpoint: Checkpoint, weights: Weights, recipe: Recipe) -> None:
    """The stored weights, tensor by tensor: all there, vectors equal, matrices as good as recipe and report say."""
    verdict.check("recipe", weights.recipe == recipe.name, recipe.name, weights.recipe)
    _check_origin(verdict, checkpoint, weights)
    _check_vectors(verdict, checkpoint, weights)
    names = [name for name, entry in weights.index.items() if entry["kind"] != "vector"]
    figures = {
        name: _figures(checkpoint, weights, name, recipe.encoding(name))
        for name in track(names, "quality", len(names))
    }
    for kind in KINDS:
        of_kind = {name: found for name, found in figures.items() if matrix_kind(name) == kind}
        if of_kind:  # a missing tensor has been named
            _check_kind(verdict, kind, recipe.encodings[kind], of_kind)
    _check_report(verdict, weights.tree / "report.json", figures)


def _check_origin(verdict: Verdict, checkpoint: Checkpoint, weights: Weights) -> None:
    digests = checkpoint.digest, weights.checkpoint_digest
    verdict.check("checkpoint of the weights", digests[0] == digests[1], digests[0][:12], digests[1][:12])
    layers = {name for name in checkpoint.names() if name.startswith("layers.")}
    expected = {name: checkpoint.shape(name) for name in layers | {"norm.weight", HEAD}}
    found = {name: tuple(entry["shape"]) for name, entry in weights.index.items()}
    wrong = sorted(dict(expected.items() ^ found.items()))
    text = f"{len(expected)} with their shapes"
    verdict.check("tensors of the checkpoint", not wrong, text, f"another {wrong[0]}" if wrong else text)


def _check_vectors(verdict: Verdict, checkpoint: Checkpoint, weights: Weights) -> None:
    names = [name for name, entry in weights.index.items() if entry["kind"] == "vector"]
    wrong = [name for name in names if not np.array_equal(checkpoint.float32(name), weights.vector(name))]
    verdict.check(f"{len(names)} vectors", not wrong, "equal", f"another {wrong[0]}" if wrong else "equal")


@dataclass(frozen=True)
class Figures:
    """Of a stored matrix: how it is stored, SNR in dB (infinite: exact), number of weights, bytes in a bundle.

    `beyond` is how far the worst weight is off its code, `off_means` how far its worst palette is off the means of its
    weights (0 without palettes; see `stored_codes` for both), `kept` how many weights are kept to the bit.
    """

    encoding: str
    snr_db: float
    parameters: int
    bytes: int
    beyond: float
    off_means: float
    kept: int


def _figures(checkpoint: Checkpoint, weights: Weights, name: str, encoding: Encoding) -> Figures:
    stored, parameters = weights.linear(name), math.prod(checkpoint.shape(name))
    compared = _compared(checkpoint, stored, name, encoding)
    match stored:
        case Dense():
            text, size = stored.array.dtype.name, stored.array.nbytes
        case Palette():
            text, size = _palettes(stored.bits, stored.group_size), stored.codebook.nbytes
        case Linear():
            text, size = _integers(stored.bits, stored.block_size), stored.steps.nbytes
    if not isinstance(stored, Dense):
        size += parameters * stored.bits // 8  # the artifact spends a byte on every code
    return Figures(text, parameters=parameters, bytes=size, **compared)


def _wanted(encoding: Encoding) -> str:
    match encoding:
        case DenseEncoding():
            return encoding.dtype
        case PaletteEncoding():
            return _palettes(encoding.bits, encoding.group_size)
        case LinearEncoding():
            return _integers(encoding.bits, encoding.block_size)


def _palettes(bits: int, group_size: int) -> str:
    return f"{bits}-bit palettes per {group_size} rows"


def _integers(bits: int, block_size: int) -> str:
    return f"{bits}-bit integers per {block_size} columns"


def _compared(checkpoint: Checkpoint, stored: Matrix, name: str, encoding: Encoding) -> dict[str, Any]:
    """What `Figures` tells of a stored matrix against the checkpoint's, in blocks of rows of whole groups.

    All in float64. Raises UserError for a code beyond its width.
    """
    signal, noise, beyond, means, kept = 0.0, 0.0, [], [0.0], 0
    group_size = stored.group_size if isinstance(stored, Palette) else 1
    for rows in row_blocks(checkpoint.shape(name), multiple=group_size):
        _check_width(name, stored, rows)
        original = checkpoint.float32(name, rows).astype(np.float64)
        signal += float(np.square(original).sum())
        noise += float(np.square(original - stored.dequantize(rows)).sum())
        beyond.append(beyond_code(stored, encoding, rows, original))
        if isinstance(stored, Palette) and isinstance(encoding, PaletteEncoding):
            means.append(off_means(stored, encoding.tolerance, rows, original))
        kept += kept_to_the_bit(stored, rows, original) if _on_grid(encoding) else 0
    return {
        "snr_db": _decibels(signal, noise),
        "beyond": float(np.max(beyond)),  # NaN, where there is one
        "off_means": float(np.max(means)),
        "kept": kept,
    }


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _on_grid(encoding: Encoding) -> bool:
    return isinstance(encoding, LinearEncoding) and encoding.scheme == "qat"


def _check_width(name: str, stored: Matrix, rows: slice) -> None:
    """Codes take a byte in the artifact, where a bundle has fewer bits for them."""
    if isinstance(stored, Dense):
        return
    codes, signed = (stored.codes, 1) if isinstance(stored, Linear) else (stored.indices, 0)
    lowest, above = -signed << (stored.bits - 1), 1 << (stored.bits - signed)
    if codes[rows].min() < lowest or codes[rows].max() >= above:
        raise UserError(f"{name} holds a code that {stored.bits} bits cannot hold: build the weights again")


def _check_kind(verdict: Verdict, kind: str, encoding: Encoding, figures: dict[str, Figures]) -> None:
    """All matrices of a kind: stored as the recipe says, none with more noise than that may have."""
    wanted = _wanted(encoding)
    wrong = [f"{found.encoding}: {name}" for name, found in figures.items() if found.encoding != wanted]
    verdict.check(f"{kind}: encoding", not wrong, wanted, wrong[0] if wrong else wanted)
    noisy = {name: found.snr_db for name, found in figures.items() if found.snr_db != math.inf}
    if noisy:  # a tensor that is stored exactly has no noise
        worst = min(noisy, key=lambda name: (not math.isnan(noisy[name]), noisy[name]))
        verdict.at_least(f"{kind}: least SNR of a tensor, dB", noisy[worst], encoding.snr_floor_db, worst)
    _at_most(
        verdict, f"{kind}: a weight off its code", 0.0, {n: found.beyond for n, found in figures.items()}
    )
    if isinstance(encoding, PaletteEncoding):
        means = {name: found.off_means for name, found in figures.items()}
        _at_most(verdict, f"{kind}: entries off the means of their weights, of what is allowed", 1.0, means)
    if _on_grid(encoding):
        shares = {name: found.kept / found.parameters for name, found in figures.items()}
        least = min(shares, key=lambda name: shares[name])
        verdict.at_least(f"{kind}: share of weights kept to the bit", shares[least], _LEAST_KEPT, least)


def _at_most(verdict: Verdict, what: str, bound: float, by_tensor: dict[str, float]) -> None:
    """The largest figure of a tensor; NaN counts as larger than any."""
    worst = max(by_tensor, key=lambda name: (math.isnan(by_tensor[name]), by_tensor[name]))
    verdict.at_most(what, by_tensor[worst], bound, worst)


def _check_report(verdict: Verdict, path: Path, figures: dict[str, Figures]) -> None:
    """The report's figures are those found here: SNR of each matrix (null: exact), bits per weight of each kind."""
    report = json.loads(path.read_text(encoding="utf-8"))
    said = {
        name: math.inf if entry["snr_db"] is None else entry["snr_db"]
        for name, entry in report["tensors"].items()
    }
    missing = sorted(figures.keys() ^ said.keys())
    wrong = [name for name in figures if name in said and not _agree(figures[name].snr_db, said[name])]
    if missing:
        found = f"{missing[0]} is in one of the two only"
    else:
        first = wrong[0] if wrong else None
        found = f"{first}: {said[first]} dB, measured {figures[first].snr_db:.2f}" if first else "equal"
    verdict.check("quality report against the stored weights", found == "equal", "equal", found)
    for kind in KINDS:
        of_kind = [entry for name, entry in figures.items() if matrix_kind(name) == kind]
        _check_bits(verdict, kind, report["kinds"][kind], of_kind)
    _check_bits(verdict, "all matrices", report["total"], list(figures.values()))


def _agree(found: float, said: float) -> bool:
    return found == said or abs(found - said) <= _REPORT_TOLERANCE_DB


def _check_bits(verdict: Verdict, what: str, said: dict[str, Any], figures: list[Figures]) -> None:
    """Bits per weight as shipped, codebooks included."""
    size, parameters = sum(entry.bytes for entry in figures), sum(entry.parameters for entry in figures)
    found, bits = said["bits_per_weight"], round(8 * size / max(1, parameters), 4)
    verdict.check(f"{what}: bits per weight as shipped", found == bits, str(bits), str(found))


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
