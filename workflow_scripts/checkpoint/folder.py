"""A published checkpoint folder: which of its files count, and which tensors those hold."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.safetensors import TensorInfo, read_header
from workflow_scripts.errors import UserError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Files beside the weights that a release, the oracle or a licence needs; all but the first two are optional.
COMPANIONS = (
    CONFIG,
    TOKENIZER,
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer*.json",
    "tokenizer.model",
    "*.jinja",
    "README*",
    "LICENSE*",
    "NOTICE*",
)
WEIGHTS = ("model*.safetensors", INDEX)
_SHOWN = 10


def shorten(names: list[str]) -> str:
    """Up to ten names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def needed_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint, sorted by name.

    With an index only the shards that it names count, so a stray model.safetensors beside them is left out. Raises
    UserError naming what is missing.
    """
    companions = {path for pattern in COMPANIONS for path in folder.glob(pattern) if not path.is_dir()}
    companions |= {folder / CONFIG, folder / TOKENIZER}
    for path in sorted(companions):
        _require_file(path)
    return sorted({*companions, *_weight_files(folder)})


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json, whatever its line endings."""
    return _read_json_object(folder / CONFIG)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor by its published name. Raises UserError where index and shards do not fit each other."""
    if not (folder / INDEX).is_file():
        return read_header(folder / SINGLE)
    index = _read_index(folder)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(index.values())):
        infos = read_header(folder / shard)
        listed = {name for name, file in index.items() if file == shard}
        if absent := sorted(listed - infos.keys()):
            raise UserError(
                f"{folder / shard} lacks {len(absent)} tensors that {INDEX} places there: {shorten(absent)}; "
                "index and shards are of different versions: fetch the checkpoint again"
            )
        if unlisted := sorted(infos.keys() - listed):
            raise UserError(
                f"{folder / shard} holds {len(unlisted)} tensors that {INDEX} does not place there: "
                f"{shorten(unlisted)}; index and shards are of different versions: fetch the checkpoint again"
            )
        tensors |= infos
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        shards = sorted(set(_read_index(folder).values()))
        if missing := [shard for shard in shards if not (folder / shard).is_file()]:
            raise UserError(_missing_shards(folder, missing, len(shards)))
        return [folder / INDEX, *(folder / shard for shard in shards)]
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if shards and not (folder / SINGLE).is_file():
        raise UserError(
            f"{folder} holds shards ({shorten(shards)}) but no {INDEX}, which says what belongs to them: fetch it"
        )
    _require_file(folder / SINGLE)
    return [folder / SINGLE]


def _missing_shards(folder: Path, missing: list[str], total: int) -> str:
    message = (
        f"{folder}: {len(missing)} of the {total} shards that {INDEX} names are missing: {shorten(missing)}; "
    )
    if len(missing) == total and (folder / SINGLE).is_file():
        return message + f"if {SINGLE} is the whole checkpoint, delete {INDEX}, else fetch the shards"
    return message + "fetch the checkpoint again"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    path = folder / INDEX
    index = _read_json_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{path} has no weight_map: fetch it again")
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(
                f"{path} places tensor {name} in {shard!r}, which is no file name: fetch it again"
            )
    return index


def _read_json_object(path: Path) -> dict[str, Any]:
    _require_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except ValueError as problem:
        raise UserError(f"{path} is not readable JSON ({problem}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object: fetch it again")
    return value


def _require_file(path: Path) -> None:
    if path.is_file():
        return
    if path.is_symlink():
        raise UserError(
            f"{path} is a symlink to a file that is not there (an incomplete download cache?): fetch it again"
        )
    raise UserError(
        f"{path} is missing: a checkpoint needs {CONFIG}, {TOKENIZER} and {SINGLE} (or its shards)"
    )
