"""`python -m workflow_scripts store {list,size,prune,verify}`: look into the local store and keep it in bounds.

It is the store of a build with the same model files: GEMMA4_STORE, else --store, else `store.folder` of the config.
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError
from workflow_scripts.store.errors import StoreTrouble
from workflow_scripts.store.levels import open_store
from workflow_scripts.store.local import Entry, LocalStore
from workflow_scripts.store.table import table

_SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_BYTES = {
    "": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


def main(arguments: list[str]) -> int:
    """Run a command; the exit code is 1 where `verify` finds damage.

    Raises UserError where the store is off or cannot be used, or the config that names it is not valid.
    """
    options = _parse(arguments)
    store = open_store(store_folder(options.store, options.configfile), None)
    if store is None:
        raise UserError(
            "the store is off: name a folder in GEMMA4_STORE, by --store, or as store.folder in the config"
        )
    try:
        return options.run(store.local, options)
    except BrokenPipeError:  # whoever reads the table has seen enough
        raise
    except (StoreTrouble, OSError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"the store {store.local.folder} cannot be used: {reason}") from None


def store_folder(named: str | None, configfiles: list[Path]) -> str | None:
    """The folder that a command line names, else the config; not read where the environment goes over it anyway."""
    if named or os.environ.get("GEMMA4_STORE"):
        return named
    return read_config(configfiles).store.folder


def show_size(size: int) -> str:
    """Bytes for people, such as `4.7 MB`."""
    for unit in ("TB", "GB", "MB", "kB"):
        if size >= _BYTES[unit]:
            return f"{size / _BYTES[unit]:.1f} {unit}"
    return f"{size} B"


def _list(store: LocalStore, _: argparse.Namespace) -> int:
    rows = [("STAGE", "ARTIFACT", "SIZE", "AGE", "KEY")]
    with store.lock():  # says what a glob over the folder would not: that it cannot be read
        entries = list(store.entries())
    for entry in entries:
        made = entry.manifest.ingredients
        age = _show_age(time.time() - entry.stored)
        rows.append((made.stage, made.artifact, show_size(entry.size), age, made.key[:12]))
    print(table(rows))
    return 0


def _size(store: LocalStore, _: argparse.Namespace) -> int:
    with store.lock():
        entries, unique = list(store.entries()), store.unique_size()
    rows = [
        ("folder", str(store.folder)),
        ("entries", str(len(entries))),
        ("bytes", f"{sum(entry.size for entry in entries):,}"),
        ("unique bytes", f"{unique:,}"),
    ]
    print(table(rows))
    return 0


def _prune(store: LocalStore, options: argparse.Namespace) -> int:
    if options.older_than is None and options.max_size is None:
        raise UserError("say what to delete: --older-than 30d (by last use), --max-size 20GB, or both")
    try:
        store.root.stat()
    except FileNotFoundError:  # nothing to lock, so a first writer could not be kept out
        print("deleted 0 of 0 entries, 0 B")
        return 0
    with store.lock(alone=True):
        before, entries = store.unique_size(), list(store.entries())
        keep = entries
        if options.older_than is not None:
            keep = [entry for entry in keep if time.time() - entry.used <= options.older_than]
        if options.max_size is not None:
            keep = _newest_within(keep, options.max_size)
        store.prune(keep)
        freed = before - store.unique_size()
    print(f"deleted {len(entries) - len(keep)} of {len(entries)} entries, {show_size(freed)}")
    return 0


def _newest_within(entries: list[Entry], limit: int) -> list[Entry]:
    """The most recently used entries whose files, each counted once, fit the limit."""
    keep: list[Entry] = []
    sizes: dict[str, int] = {}
    for entry in sorted(entries, key=lambda entry: entry.used, reverse=True):
        sizes |= {file.sha256: file.size for file in entry.manifest.files}
        if sum(sizes.values()) > limit:
            break
        keep.append(entry)
    return keep


def _verify(store: LocalStore, options: argparse.Namespace) -> int:
    with store.lock(alone=options.repair):
        damaged = list(store.damaged())
        names = {entry.manifest.ingredients.key: entry.manifest.ingredients for entry in store.entries()}
        if damaged and options.repair:
            store.repair()
    if not damaged:
        print(f"{len(names)} entries, all whole")
        return 0
    rows = [("STAGE", "ARTIFACT", "KEY", "DAMAGE")]
    for key, trouble in damaged:
        made = names.get(key)
        rows.append((made.stage if made else "-", made.artifact if made else "-", key[:12], trouble))
    print(table(rows))
    print(
        "deleted; they will be built again" if options.repair else "delete them with: store verify --repair"
    )
    return 1


def _show_age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= _SECONDS[unit]:
            return f"{seconds // _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time span: write 12h, 30d or 4w")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", text)
    unit = {name.lower(): factor for name, factor in _BYTES.items()}.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500MB, 20GB or 20GiB")
    return int(float(match[1]) * unit)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts store", description=__doc__)
    parser.add_argument("--store", metavar="FOLDER", help="another folder; GEMMA4_STORE goes over it")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[LocalStore, argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help)
        command.add_argument(
            "--configfile", nargs="+", default=[], type=Path, metavar="FILE", help="as given to snakemake"
        )
        command.set_defaults(run=run)
        return command

    add("list", _list, "what is stored, the newest first")
    add("size", _size, "how much is stored")
    prune = add("prune", _prune, "delete entries, the least recently used first")
    prune.add_argument("--older-than", type=_duration, metavar="30d", help="not used for so long")
    prune.add_argument("--max-size", type=_bytes, metavar="20GB", help="until so much is left")
    verify = add("verify", _verify, "hash everything; exit code 1 if something is damaged")
    verify.add_argument("--repair", action="store_true", help="delete what is damaged")
    return parser.parse_args(arguments)
