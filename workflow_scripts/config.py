"""The configuration: checked once, then plain frozen data that the rules read.

Shape and meaning of every key: `config/schema.yaml`, and for people `config/README.md`. The problems of a stage of
the checks are reported together, each with its key, the value found, what is allowed and, for a slip of the pen, the
nearest valid name.
"""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from workflow_scripts.configuration.build import build
from workflow_scripts.configuration.data import (
    DECODE_FORMS,
    GATES,
    KERNEL_BITS,
    STATE_CORES,
    TABLE_FORMS,
    Config,
    StoreConfig,
)
from workflow_scripts.configuration.meaning import gate_problems, meaning_problems
from workflow_scripts.configuration.shape import key_problems, shape_problems
from workflow_scripts.configuration.wording import show
from workflow_scripts.errors import UserError

__all__ = [
    "DECODE_FORMS",
    "DEFAULT",
    "GATES",
    "KERNEL_BITS",
    "STATE_CORES",
    "TABLE_FORMS",
    "Config",
    "StoreConfig",
    "load_config",
    "overlay",
    "read_config",
]

DEFAULT = Path(__file__).parents[1] / "config" / "config.yaml"
_DROPPABLE = ("artifacts", "folders")  # a model file drops an inherited entry of these by setting it to null
_OPTIONAL = "coreml"  # and this whole section likewise


def load_config(raw: dict[str, Any]) -> Config:
    """Check a parsed configuration and give it as data; one UserError lists the problems found."""
    if not isinstance(raw, Mapping):
        raise UserError(f"configuration: found {show(raw)}, needs keys with values")
    raw = _without_dropped(raw)
    for check in (key_problems, shape_problems, meaning_problems):  # each relies on the one before
        _refuse(check(raw))
    config = build(raw)
    _refuse(gate_problems(config))
    return config


def read_config(model_files: Iterable[Path]) -> Config:
    """The default configuration with model files laid over it, as `snakemake --configfile` does."""
    raw: dict[str, Any] = {}
    for path in (DEFAULT, *model_files):
        raw = overlay(raw, _read(path))
    return load_config(raw)


def overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one configuration over another as Snakemake does: mappings merge, anything else replaces."""
    merged = dict(copy.deepcopy(base))
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            value = overlay(below if isinstance(below, Mapping) else {}, value)
        merged[key] = value
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"the configuration file {path} cannot be read: {problem.strerror}") from None
    except (ValueError, yaml.YAMLError) as problem:
        raise UserError(
            f"the configuration file {path} is not YAML: {' '.join(str(problem).split())}"
        ) from None
    if not isinstance(raw, dict):
        raise UserError(f"the configuration file {path} needs keys with values at its top")
    return raw


def _refuse(found: Iterable[str]) -> None:
    if problems := list(found):
        raise UserError("\n  ".join(["the configuration is not valid:", *problems]))


def _without_dropped(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the entries, and the optional section, that a model file set to null."""
    return {
        section: {key: value for key, value in entries.items() if value is not None}
        if section in _DROPPABLE and isinstance(entries, Mapping)
        else entries
        for section, entries in raw.items()
        if section != _OPTIONAL or entries is not None
    }
