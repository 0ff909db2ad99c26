"""Reading a checked checkpoint (the result of stage `checkpoint`): every tensor mapped, under its canonical name."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from workflow_scripts.checkpoint.safetensors import TensorInfo, map_tensor
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError

FORMAT = 1
RECORD = "checkpoint.json"
SOURCE = "source"


@dataclass(frozen=True)
class Checkpoint:
    """The text decoder's configuration and weights.

    `digest` is the identity of the canonical configuration and the text weights: equal for every layout that holds the
    same numbers in the same dtype (pruned or not, shards or one file, with or without other modalities).
    `source` is the folder with the published files, for libraries that read a checkpoint by themselves.
    """

    config: TextConfig
    digest: str
    source: Path
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, tree: Path) -> Self:
        """Open a result folder of stage `checkpoint`. Raises UserError where it is none."""
        try:
            record = json.loads((tree / RECORD).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{tree} is not a checked checkpoint: it has no {RECORD}") from None
        if record["format"] != FORMAT:
            raise UserError(f"{tree / RECORD} has format {record['format']}, not {FORMAT}: build it again")
        source = tree / SOURCE
        tensors = {
            name: TensorInfo(
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                path=source / entry["file"],
                offset=entry["offset"],
                size=entry["size"],
            )
            for name, entry in record["tensors"].items()
        }
        return cls(TextConfig.from_json(record["text_config"]), record["digest"], source, tensors)

    def names(self) -> list[str]:
        """Canonical names of all text tensors, sorted."""
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; the per-layer embedding table is always [vocab_size, layers * size]."""
        return self.tensors[name].shape

    def array(self, name: str) -> np.ndarray:
        """A tensor in its stored dtype (float32, float16 or ml_dtypes.bfloat16), mapped from the file."""
        return map_tensor(self.tensors[name])

    def float32(self, name: str, rows: slice | np.ndarray = slice(None)) -> np.ndarray:
        """Rows of a tensor as a new float32 array (exact: every stored dtype fits into float32)."""
        return self.array(name)[rows].astype(np.float32)
