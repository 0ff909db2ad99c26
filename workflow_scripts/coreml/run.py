"""Dialogues through a finished package, in numpy; called through `isolated`."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from workflow_scripts.coreai.isolated import Arrays
from workflow_scripts.coreml.contents import token_part
from workflow_scripts.coreml.evaluate import Evaluator
from workflow_scripts.coreml.package import Package
from workflow_scripts.progress import track
from workflow_scripts.tables.raw import RawTables

Step = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def compute(package: str, tables: str, ids: dict[str, list[int]], state_dtypes: list[str]) -> Arrays:
    """`STATE_DTYPE.DIALOGUE` -> logits [n, rows] float32, by the stored program in numpy; see `Evaluator`."""
    opened, found = Package.open(Path(package)), {}
    for dtype in state_dtypes:

        def begin(dtype: str = dtype) -> Step:
            evaluator = Evaluator(opened, dtype)
            return lambda inputs: evaluator.call(inputs)["logits"]

        logits = feed(begin, Path(tables), ids)
        found |= {f"{dtype}.{name}": rows for name, rows in logits.items()}
    return found


def feed(begin: Callable[[], Step], folder: Path, ids: dict[str, list[int]]) -> Arrays:
    """Every dialogue token by token, each with states of its own."""
    tables, found = RawTables.open(folder), {}
    for dialogue, tokens in ids.items():
        step, rows = begin(), []
        for position, token in enumerate(track(tokens, dialogue, len(tokens))):
            inputs = {
                "input_ids": np.array([[token]], np.int32),
                "position_ids": np.array([[position]], np.int32),
                "ple_tokens": token_part(tables, token),
            }
            rows.append(step(inputs).reshape(-1))
        found[dialogue] = np.stack(rows)
    return found
