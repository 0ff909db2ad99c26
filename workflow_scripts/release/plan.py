"""`gemma4_plan.json`: what a host needs to know to drive a folder's bundles, and nothing else to be known.

format          1
driver          the loop that runs the set: `hostcache`, or `chunks`, whose chunks have a plan of their own beside this
bundles         role -> bundle in this folder
tables          gather tables (per-layer and token embeddings) as paths from this folder, may be empty: its own by
                name, those of another folder of the release as `../<folder>/<name>`; a set without a front end reads
                the embeddings from the first
tokenizer       folder of the tokenizer files
context         positions the bundles were exported for
stop_token_ids  ids that end an answer
text            shape of the decoder, by the names of the checkpoint's config; `slots` lists, for each layer
                type, the layers that own a kv_cache slot: their place in the list is the slot
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.release.names import FORMAT, PLAN

_TEXT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "sliding_window",
    "final_logit_softcapping",
    "max_position_embeddings",
    "bos_token_id",
    "pad_token_id",
)


@dataclass(frozen=True)
class Plan:
    """The content of a plan file; the fields are explained at the top of the module."""

    driver: str
    bundles: dict[str, str]
    tables: list[str]
    tokenizer: str
    context: int
    stop_token_ids: list[int]
    text: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the plan into its folder."""
        write_json(folder / PLAN, {"format": FORMAT, **asdict(self)})

    @classmethod
    def open(cls, folder: Path) -> "Plan":
        """Read a folder's plan and check that all it names is there.

        Raises UserError where the folder has no plan, one of another format, or where a file or a folder that must
        lie beside it is missing.
        """
        path = folder / PLAN
        if not path.is_file():
            raise UserError(f"{folder} has no {PLAN}: it is no folder that a host can drive by itself")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            plan = cls(**raw)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise UserError(f"{path} is not a plan this version reads: {problem}") from None
        for name in [*plan.bundles.values(), *plan.tables, plan.tokenizer]:
            if not (folder / name).exists():
                raise UserError(_missing(folder, name))
        return plan

    def tables_elsewhere(self, folder: Path) -> set[Path]:
        """The other folders (resolved) that hold tables of the plan of `folder`."""
        return {(folder / name).resolve().parent for name in self.tables} - {folder.resolve()}


def beside(folder: str, name: str) -> str:
    """How a plan names a file of another folder of the same release."""
    return f"../{folder}/{name}"


def _missing(folder: Path, name: str) -> str:
    up, *inner = PurePosixPath(name).parts
    if up != ".." or len(inner) < 2:
        return f"{folder / name} is missing, but {PLAN} names it: fetch the folder again"
    return (
        f"{(folder / name).resolve()} is missing: the tables for {folder.resolve().name} lie in the folder "
        f"`{inner[0]}` of the same release; put that folder beside this one"
    )


def host_text(config: TextConfig) -> dict[str, Any]:
    """The plan's `text`: what a host needs of the decoder's shape."""
    fields = config.to_json()
    return {
        **{name: fields[name] for name in _TEXT_FIELDS},
        "layer_types": list(config.layer_types),
        "slots": {kind: config.slots(kind) for kind in sorted(set(config.layer_types))},
    }
