"""Which files of a published folder make up the checkpoint.

Apart from reading them, so that the workflow can ask while it plans, without numpy.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from workflow_scripts.errors import UserError

LOCAL = "local"  # the stage's `source` where the files of a folder come as inputs
REHEARSAL = "rehearsal"  # where a folder of random weights does
_INPUT = "source"
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
    """The files that make up the checkpoint, sorted by name; nothing else in the folder counts.

    With an index only the shards that it names count, so a stray model.safetensors beside them is left out. Raises
    UserError naming what is missing, cannot be read or is a symlink to nothing.
    """
    companions = {path for path in _entries(folder) if _is_companion(path)}
    companions |= {folder / CONFIG, folder / TOKENIZER}
    for path in sorted(companions):
        _require_file(path)
    return sorted({*companions, *_weight_files(folder)})


def local_inputs(folder: Path) -> dict[str, Path]:
    """Inputs of stage `checkpoint` for a local folder: each needed file under its name, `source/<file name>`.

    So neither the folder's place nor anything else that lies in it goes into the result's key. Raises UserError as
    `needed_files` does.
    """
    return {f"{_INPUT}/{path.name}": path for path in needed_files(folder)}


def planned_inputs(folder: Path) -> tuple[dict[str, Path], str | None]:
    """Inputs to plan with, which needs config.json alone, and what a run would stop at: None where nothing is missing.

    With all files there the inputs are those of `local_inputs`, so that a plan says what a run would do; else they are
    the files that are there. Raises UserError where the folder or a readable config.json is missing.
    """
    try:
        return local_inputs(folder), None
    except UserError as missing:
        if not (folder / CONFIG).is_file():
            raise
        read_json_object(folder / CONFIG)
        present = [
            path
            for path in _entries(folder)
            if _matches(path.name, (*COMPANIONS, *WEIGHTS)) and path.is_file()
        ]
        return {f"{_INPUT}/{path.name}": path for path in sorted(present)}, str(missing)


def local_folder(inputs: Mapping[str, Path]) -> Path | None:
    """The folder of a local checkpoint, None without inputs.

    The inputs are its needed files as `local_inputs` names them, or one input `source`, the folder as a whole. Raises
    UserError where they lie in several folders, or are not exactly the needed files any more.
    """
    folders = {path if name == _INPUT else path.parent for name, path in inputs.items()}
    if not folders:
        return None
    if len(folders) > 1:
        raise UserError(
            f"a local checkpoint lies in one folder, not in {', '.join(map(str, sorted(folders)))}"
        )
    folder = folders.pop()
    if _INPUT not in inputs and (changed := inputs.keys() ^ local_inputs(folder).keys()):
        names = sorted(name.removeprefix(f"{_INPUT}/") for name in changed)
        raise UserError(
            f"{folder} changed after the run was planned ({shorten(names)} came or went): run again"
        )
    return folder


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        state = "is no folder" if folder.exists() else "does not exist"
        raise UserError(f"the checkpoint folder {folder} {state}: correct checkpoint.source in the config")
    try:
        return list(folder.iterdir())
    except OSError as problem:
        raise UserError(f"the checkpoint folder {folder} cannot be read: {problem.strerror}") from None


def _is_companion(path: Path) -> bool:
    """By name and not by looking at the file, so that a symlink to nothing is found and named."""
    return _matches(path.name, COMPANIONS) and not path.is_dir()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard file name, from the index of a checkpoint in shards."""
    path = folder / INDEX
    index = read_json_object(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{path} has no weight_map: fetch it again")
    for name, shard in index.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UserError(
                f"{path} places tensor {name} in {shard!r}, which is no file name: fetch it again"
            )
    return index


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object, whatever its line endings. Raises UserError where the file is missing or holds none."""
    _require_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # some editors put a byte order mark first
    except ValueError as problem:
        raise UserError(f"{path} is not readable JSON ({problem}): fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object: fetch it again")
    return value


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_symlink() or (folder / INDEX).exists():
        shards = sorted(set(read_index(folder).values()))
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
