"""Reading a published checkpoint folder: its config.json, and which tensors its weight files hold."""

from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.needed import CONFIG, INDEX, SINGLE, read_index, read_json_object, shorten
from workflow_scripts.checkpoint.safetensors import TensorInfo, read_header
from workflow_scripts.errors import UserError


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json, whatever its line endings."""
    return read_json_object(folder / CONFIG)


def read_tensors(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor by its published name. Raises UserError where index and shards do not fit each other."""
    if not (folder / INDEX).is_file():
        return read_header(folder / SINGLE)
    index = read_index(folder)
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
