"""`gemma4_plan.json`: what a host needs to know to drive a folder's bundles, and nothing else to be known.

format          1
driver          the loop that runs the set: `hostcache`; `chunks`, whose chunks have a plan of their own beside this; or
                `decode`, whose one bundle takes token ids, gives logits, and keeps its kv_cache in states
bundles         role -> bundle in this folder
tables          gather tables (per-layer and token embeddings) as paths from this folder, may be empty: its own by
                name, those of another folder of the release as `../<folder>/<name>`; a set without a front end reads
                the first
tokenizer       folder of the tokenizer files
context         positions that a conversation may have
stop_token_ids  ids that end an answer
text            shape of the decoder, by the names of the checkpoint's config; `slots` lists, for each layer
                type, the layers that own a kv_cache slot: their place in the list is the slot
cache_minimum   columns that a kv_cache which grows has at least; at most it has one more than `context`. Null where
                none grows
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
    cache_minimum: int | None = None

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


def beside(folder: str, other: str, name: str) -> str:
    """How the plan of `folder` names a file of another folder of the same release; a folder's name may have slashes."""
    return f"{'../' * (folder.count('/') + 1)}{other}/{name}"


def check_context(folder: Path, plan: Plan, positions: int, exported: str) -> None:
    """Raise UserError where bundles have room for another number of positions than the plan says.

    `exported` says which bundles, such as "core was".
    """
    if positions != plan.context:
        raise UserError(
            f"{folder}: its plan says context {plan.context}, its {exported} exported for {positions}: fetch it again"
        )


def _missing(folder: Path, name: str) -> str:
    parts = PurePosixPath(name).parts
    depth = parts.count("..")
    if not depth or len(parts) < depth + 2:
        return f"{folder / name} is missing, but {PLAN} names it: fetch the folder again"
    other, here = "/".join(parts[depth:-1]), folder.resolve()
    return (
        f"{(folder / name).resolve()} is missing: the tables for {here.name} lie in the folder `{other}` of the same "
        f"release; put that folder beside {[here, *here.parents][depth - 1]}"
    )


def host_text(config: TextConfig) -> dict[str, Any]:
    """The plan's `text`: what a host needs of the decoder's shape."""
    fields = config.to_json()
    return {
        **{name: fields[name] for name in _TEXT_FIELDS},
        "layer_types": list(config.layer_types),
        "slots": {kind: config.slots(kind) for kind in sorted(set(config.layer_types))},
    }
