"""Seconds of a job: of its own last build here, of a like model's, or documented ones that go by bytes.

The benchmark files of Snakemake are of no use for it: where a result came from the store, they tell how long that took.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml

from workflow_scripts.configuration.data import LONG_RUN
from workflow_scripts.usage.record import SUFFIX, Record, read_record, record_path
from workflow_scripts.why import Command

_FIGURES = Path(__file__).with_name("figures.yaml")
HERE, LIKE, DOCUMENTED, UNKNOWN = "measured here", "measured here with", "documented, by bytes", "unknown"
_ALIKE = 2.0  # checkpoints up to so many times larger or smaller are of like models
# A turn's frame of special tokens, and characters in a token.
_FRAME, _CHARACTERS = 10, 4

Find = Callable[[Path], Command | None]


class Seconds(NamedTuple):
    """Seconds of a job, None where nobody knows, and where the number comes from."""

    value: float | None
    origin: str


@dataclass(frozen=True)
class Dialogues:
    """What the oracle is asked, as its stage has it: name -> the keys of the config."""

    asked: dict[str, dict[str, Any]]

    def positions(self, names: Iterable[str]) -> int:
        """How many positions these dialogues feed, about: prompts are tokenized later, and answers may end earlier."""
        return sum(_fed(self.asked[name]) for name in names if name in self.asked)

    def with_numbers(self) -> list[str]:
        """Those whose logits are compared."""
        return [name for name, dialogue in self.asked.items() if dialogue.get("numbers")]

    def long(self, wanted: bool) -> list[str]:
        """Those of gate `long_run`, or the others."""
        return [name for name, dialogue in self.asked.items() if (_fed(dialogue) >= LONG_RUN) is wanted]


def _fed(dialogue: dict[str, Any]) -> int:
    prompt = len(dialogue.get("prompt_ids", ()))
    answers = len(dialogue.get("expect_ids", ())) or dialogue["new_tokens"]
    turns = dialogue.get("turns", [""])
    if not prompt:
        prompt = sum(_FRAME + len(turn) // _CHARACTERS for turn in turns)
    return prompt + answers * len(turns) - 1


class Clock:
    """What jobs of one model take. `find` gives a result's command, `size` is the checkpoint's in bytes."""

    def __init__(self, results: Path, size: int | None, dialogues: Dialogues, find: Find) -> None:
        self._figures = yaml.safe_load(_FIGURES.read_text(encoding="utf-8"))
        self._size, self._dialogues, self._find = size, dialogues, find
        self._like = list(_like_models(results, size))

    def seconds(self, command: Command) -> Seconds:
        """See the module."""
        own = read_record(record_path(command.log))
        if own is not None and not own.failed and own.stage == command.stage:
            return Seconds(own.figures.seconds, f"{HERE}, {_date(own)}")
        positions = self._positions(command)
        if positions is None:  # else it goes by the dialogues, and a like model was asked others
            for model, factor, records in self._like:
                if same := [record for record in records if record.stage == command.stage]:
                    seconds = factor * mean(record.figures.seconds for record in same)
                    return Seconds(seconds, f"{LIKE} {model}, {_date(same[-1])}, by bytes")
        once = self._documented("stages", command.stage)
        if once is None:
            return Seconds(None, UNKNOWN)
        return Seconds(once + (positions or 0), DOCUMENTED)

    def _positions(self, command: Command) -> float | None:
        """Seconds of the positions that a job feeds; None for one that feeds none."""
        stage, numbers = command.stage, self._dialogues.with_numbers()
        if stage in ("oracle", "reference", "decode_reference", "gate_fp16"):
            names = self._dialogues.asked if stage == "oracle" else numbers
            return self._dialogues.positions(names) * (self._documented("positions", stage) or 0)
        if stage.startswith("gate_numbers"):
            return self._dialogues.positions(numbers) * self._runtime(command.inputs["bundle"])
        if stage not in ("gate_tokens", "gate_long_run", "gate_chat", "gate_chunks"):
            return None
        folder = self._find(command.inputs["folder"])
        names = {
            "gate_tokens": self._dialogues.long(False),
            "gate_long_run": self._dialogues.long(True),
            "gate_chat": command.params.get("dialogues", []),
            "gate_chunks": numbers,
        }[stage]
        room = folder.params["context"] or 0 if folder else 0
        positions = self._dialogues.positions(names)
        bundles = (
            [path for name, path in folder.inputs.items() if name.startswith("bundle_")] if folder else []
        )
        return min(positions, room * len(names)) * sum(map(self._runtime, bundles))

    def _runtime(self, bundle: Path) -> float:
        """Seconds of a position in this host's runtime."""
        made = self._find(bundle)
        if made is None:
            return 0.0
        first, last = made.params.get("layers") or (0, 1)
        return (last - first) * (self._documented("positions", made.params["form"]) or 0)

    def _documented(self, kind: str, name: str) -> float | None:
        """Between and beyond the two models by the bytes of the checkpoint; an unknown one counts as full."""
        found, sizes = self._figures[kind].get(name), self._figures["measured"]
        if found is None:
            return None
        size = sizes["full"] if self._size is None else self._size
        share = max(0.0, (size - sizes["small"]) / (sizes["full"] - sizes["small"]))
        return found["small"] + share * (found["full"] - found["small"])


def _like_models(results: Path, size: int | None) -> Iterable[tuple[str, float, list[Record]]]:
    """Other models built here with a checkpoint of about the same size: name, factor of bytes, what their jobs took."""
    for logs in sorted(results.parent.glob("*/logs")) if size else []:
        of_checkpoint = read_record(logs / "checkpoint" / f"text{SUFFIX}")
        if logs.parent == results or of_checkpoint is None or not of_checkpoint.size:
            continue
        factor = size / of_checkpoint.size
        if 1 / _ALIKE <= factor <= _ALIKE:
            records = filter(None, map(read_record, sorted(logs.rglob(f"*{SUFFIX}"))))
            yield logs.parent.name, factor, [record for record in records if not record.failed]


def _date(record: Record) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(record.ended))
