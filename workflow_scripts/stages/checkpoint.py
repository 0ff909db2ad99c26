"""Stage `checkpoint`: fetch or take a checkpoint, refuse what cannot become a release, and keep it with its identity.

Result: `checkpoint.json` (canonical configuration, digest, place of every text tensor) and `source/` (the published
files that count, unchanged).

Inputs: the needed files of a local checkpoint, each as `source/<file name>` (see `local_inputs`), or its folder as
`source`; none for the Hub.

Parameters: `source` ("hf://owner/name@commit", "local", or "rehearsal" for random weights), `allow_moving_revision`,
`sha256` (file name -> pinned hex sha256), `num_hidden_layers` (what the workflow's config expects).
"""

import logging
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.fetch import fetch
from workflow_scripts.checkpoint.folder import read_config, read_tensors
from workflow_scripts.checkpoint.layout import EMBEDDING, TextTensors, select_text_tensors
from workflow_scripts.checkpoint.needed import CONFIG, local_folder, needed_files
from workflow_scripts.checkpoint.reader import FORMAT, RECORD, SOURCE
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.checkpoint.validate import check_head, check_tensor, content_digest
from workflow_scripts.errors import UserError
from workflow_scripts.files import place_file, sha256_file, write_json
from workflow_scripts.progress import Meter, track
from workflow_scripts.stages.job import Job

_LOG = logging.getLogger(__name__)


def run(job: Job) -> None:
    """Check everything where it lies, then place the files: a refused checkpoint is never copied."""
    fetched = fetch(
        job.params["source"], local_folder(job.inputs), job.params.get("allow_moving_revision", False)
    )
    files = needed_files(fetched.folder)
    config = parse_text_config(read_config(fetched.folder), str(fetched.folder / CONFIG))
    _check_layers(config, job.params["num_hidden_layers"])
    text = select_text_tensors(read_tensors(fetched.folder), config, fetched.folder)
    sizes_and_hashes = _hash_files(files)
    _check_pins(sizes_and_hashes, job.params.get("sha256") or {}, fetched.folder)
    content = _check_values(text)
    for path in files:
        place_file(path, job.out / SOURCE / path.name)
    record = {
        "format": FORMAT,
        "text_config": config.to_json(),
        "digest": content_digest(config, text.tensors, content),
        "origin": fetched.identity,
        "files": sizes_and_hashes,
        "tensors": _tensor_table(text, content),
    }
    write_json(job.out / RECORD, record)


def _check_layers(config: TextConfig, expected: int) -> None:
    if config.num_hidden_layers != expected:
        raise UserError(
            f"num_hidden_layers is {expected} in the workflow's config, but the checkpoint has "
            f"{config.num_hidden_layers} layers: correct the config, or `source` if another model was meant"
        )


def _hash_files(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Size and sha256 by file name."""
    return {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in track(files, "hash", len(files))
    }


def _check_pins(found: dict[str, dict[str, Any]], pins: dict[str, str], folder: Path) -> None:
    """Compare pinned hashes with what was fetched."""
    for name, pinned in pins.items():
        if name not in found:
            raise UserError(
                f"sha256 pins {name}, which is not part of the checkpoint {folder}: it has {', '.join(found)}"
            )
        if found[name]["sha256"] != pinned.lower():
            raise UserError(
                f"{folder / name} has sha256 {found[name]['sha256']}, but {pinned} is pinned in the config: "
                "delete the file and fetch it again, or correct the pin"
            )


def _check_values(text: TextTensors) -> dict[str, str]:
    """Read every value; returns the content sha256 by canonical name."""
    content, meter = {}, Meter("validate", sum(info.size for info in text.tensors.values()))
    for count, (name, info) in enumerate(text.tensors.items(), 1):
        _LOG.info("validate %d/%d %s", count, len(text.tensors), name)
        content[name] = check_tensor(name, info, meter)
    if text.head is not None:
        check_head(text.head, text.tensors[EMBEDDING], content[EMBEDDING])
    return content


def _tensor_table(text: TextTensors, content: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Canonical name -> where the tensor lies below `source/` (offset and size in bytes) and what it holds."""
    return {
        name: {
            "file": info.path.name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "offset": info.offset,
            "size": info.size,
            "sha256": content[name],
        }
        for name, info in text.tensors.items()
    }
