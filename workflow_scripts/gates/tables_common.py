"""What the gates of both layouts of raw tables compare alike: shapes, sizes and factors, the context projection."""

import math
from collections.abc import Callable

import numpy as np

from workflow_scripts.blocks import row_blocks
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.verdict import Verdict
from workflow_scripts.progress import track
from workflow_scripts.tables.dump import Tables

_FACTOR_TOLERANCE = 1e-15  # powers in float64, however computed: four roundings of 2^-53 are 4.4e-16

RowFigures = Callable[[slice], tuple[np.ndarray, ...]]
"""A block of rows -> figures [rows] of one kind each."""


def gate_exact_parts(verdict: Verdict, tables: Tables, checkpoint: Checkpoint) -> None:
    """The projection and its norm, and all that `meta.json` says, the checkpoint's digest included."""
    exact = {
        "per_layer_model_projection.weight": tables.projection,
        "per_layer_projection_norm.weight": tables.projection_norm,
    }
    for name, values in exact.items():
        if same_shape(verdict, checkpoint, name, values.shape):
            _check_equal(verdict, checkpoint, name, values)
    _check_meta(verdict, tables, checkpoint)


def same_shape(verdict: Verdict, checkpoint: Checkpoint, name: str, stored: tuple[int, ...]) -> bool:
    """Whether a tensor has the shape that is stored; a failed check where not."""
    expected = checkpoint.shape(name)
    if stored != expected:
        verdict.check(f"{name}: shape", False, str(list(expected)), str(list(stored)))
    return stored == expected


def row_figures(figures: RowFigures, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Each figure of all rows of a table of this shape, computed in blocks of rows."""
    blocks = list(row_blocks(shape))
    parts = map(figures, track(blocks, "rows of a table, block", len(blocks)))
    return [np.concatenate(of_kind) for of_kind in zip(*parts, strict=True)]


def worst(figure: np.ndarray) -> tuple[float, str]:
    """The largest value of a figure per row (the first NaN, where there is one) and where it is."""
    row = int(np.argmax(figure))
    return float(figure[row]), f"row {row}"


def _check_equal(verdict: Verdict, checkpoint: Checkpoint, name: str, stored: np.ndarray) -> None:
    unequal = (
        block.start
        for block in row_blocks(stored.shape)
        if not np.array_equal(checkpoint.float32(name, block), stored[block])
    )
    first = next(unequal, None)
    found = "equal" if first is None else f"another value in the rows from {first} on"
    verdict.check(f"{name}: values", first is None, "equal", found)


def _check_meta(verdict: Verdict, tables: Tables, checkpoint: Checkpoint) -> None:
    config, found = checkpoint.config, tables.meta.to_json()
    hidden, layers, size = config.hidden_size, config.num_hidden_layers, config.hidden_size_per_layer_input
    expected = {
        "V": config.vocab_size,
        "D": hidden,
        "PLD": layers * size,
        "L": layers,
        "ld": size,
        "embed_scale_main": hidden**0.5,
        "embed_scale_pl": size**0.5,
        "proj_scale": hidden**-0.5,
        "input_scale": 0.5**0.5,
        "rms_eps": config.rms_norm_eps,
    }
    wrong = [
        key
        for key, value in expected.items()
        if not math.isclose(found[key], value, rel_tol=_FACTOR_TOLERANCE)
    ]
    text = "equal" if not wrong else f"{wrong[0]} is {found[wrong[0]]}, not {expected[wrong[0]]}"
    verdict.check("meta.json", not wrong, "sizes and factors of the checkpoint", text)
    digests = checkpoint.digest, tables.meta.checkpoint
    verdict.check("checkpoint of the tables", digests[0] == digests[1], digests[0][:12], digests[1][:12])
