"""The dialogues of the embedded checkpoint, readable without torch or transformers."""

from pathlib import Path
from typing import NamedTuple

import yaml

DIALOGUES_FILE = Path(__file__).with_name("tiny_dialogues.yaml")


class Turn(NamedTuple):
    """One question and the exact answer to it."""

    user: str
    model: str


class Dialogue(NamedTuple):
    """A named chat: its turns in order."""

    name: str
    turns: tuple[Turn, ...]


def load_dialogues(path: Path = DIALOGUES_FILE) -> tuple[Dialogue, ...]:
    """Read a YAML list of `{name, turns: [{user, model}]}`."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(Dialogue(e["name"], tuple(Turn(**turn) for turn in e["turns"])) for e in entries)


DIALOGUES = load_dialogues()
