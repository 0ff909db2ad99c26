"""Reading the oracle: what the original model answers, token by token, and how sure it was.

A result of stage `oracle` holds `oracle.json` (ids; the same on every host), `measured.json` (margins) and
`measured.npz` (logits, and hidden rows of long dialogues), which may differ in the last bits from host to host.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from workflow_scripts.errors import UserError

FORMAT = 2
LONG_RUN = 256  # fed positions; a sliding cache has wrapped and errors had time to add up


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

    @property
    def said(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    @property
    def answers(self) -> list[str]:
        """What the original answers, turn by turn."""
        earlier = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return [*earlier, self.text]

    @property
    def is_long(self) -> bool:
        """Whether it belongs to the gate `long_run`; its hidden rows are stored."""
        return len(self.fed_ids) >= LONG_RUN

    def cut(self, positions: int) -> Self:
        """Its first positions, as many as there is room for: its answer then need not come to its end."""
        if len(self.fed_ids) <= positions:
            return self
        kept = max(0, positions - len(self.prompt_ids) + 1)
        gated = [index for index in self.gated if index < kept]
        return replace(self, output_ids=self.output_ids[:kept], gated=gated, stops=False)


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

    def hidden(self, name: str) -> np.ndarray:
        """[positions, hidden_size] float32 of a long dialogue: what its logits are made of."""
        with np.load(self.folder / "measured.npz") as arrays:
            return arrays[f"{name}.hidden"]

    def with_numbers(self) -> list[Dialogue]:
        """The dialogues whose logits are stored."""
        return [dialogue for dialogue in self.dialogues.values() if dialogue.numbers]
