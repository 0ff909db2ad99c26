"""Reading the oracle: what the original model answers, token by token, and how sure it was.

A result of stage `oracle` holds `oracle.json` (ids; the same on every host), `measured.json` (margins) and
`measured.npz` (logits), which may differ in the last bits from host to host.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from workflow_scripts.errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Dialogue:
    """One oracle run: the prompt's ids and the greedy answer's ids.

    `messages` are what the chat template made the prompt of; none where the config gave the ids themselves.
    `gated` lists the indices of output ids that a bundle must repeat; `stops` says that the last one is a stop token;
    `numbers` that logits of every position are stored.
    """

    name: str
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    output_ids: list[int]
    gated: list[int]
    stops: bool
    numbers: bool
    text: str

    @property
    def fed_ids(self) -> list[int]:
        """What is fed to a bundle, one id per position: the prompt and every output id but the last."""
        return self.prompt_ids + self.output_ids[:-1]

    def position_of(self, output: int) -> int:
        """The position whose logits predict output id number `output`."""
        return len(self.prompt_ids) - 1 + output


@dataclass(frozen=True)
class Oracle:
    """All dialogues, bound to one checkpoint."""

    checkpoint_digest: str
    dialogues: dict[str, Dialogue]
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read a result of stage `oracle`."""
        raw = json.loads((folder / "oracle.json").read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise UserError(
                f"{folder / 'oracle.json'} has format {raw['format']}, not {FORMAT}: build it again"
            )
        dialogues = {name: Dialogue(name=name, **entry) for name, entry in raw["dialogues"].items()}
        return cls(raw["checkpoint"], dialogues, folder)

    def logits(self, name: str) -> np.ndarray:
        """[positions, vocab] float32: row p predicts the id after position p of `fed_ids`."""
        with np.load(self.folder / "measured.npz") as arrays:
            return arrays[name]

    def with_numbers(self) -> list[Dialogue]:
        """The dialogues whose logits are stored."""
        return [dialogue for dialogue in self.dialogues.values() if dialogue.numbers]
