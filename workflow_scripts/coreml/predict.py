"""Dialogues through a finished package by Core ML; called through `isolated`. A Mac alone runs this."""

from pathlib import Path

import coremltools

from workflow_scripts.coreai.isolated import Arrays
from workflow_scripts.coreml.run import Step, feed


def predict(package: str, tables: str, ids: dict[str, list[int]]) -> Arrays:
    """Dialogue -> logits [n, rows] float32, by Core ML: macOS 15 or later alone has it, and states."""
    model = coremltools.models.MLModel(package)

    def begin() -> Step:
        state = model.make_state()
        return lambda inputs: model.predict(dict(inputs), state)["logits"]

    return feed(begin, Path(tables), ids)
