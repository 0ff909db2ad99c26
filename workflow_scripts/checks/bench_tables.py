"""Part of `make bench`: int8 tables beside a plain copy of their bytes, within the system's file cache.

One thread each, in one run and in turns, on rows of the real model's per-layer embedding table.
"""

import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import SafetensorsWriter, read_header
from workflow_scripts.checks.measure import all_reached, copy_bytes, least_seconds
from workflow_scripts.errors import UserError
from workflow_scripts.tables.raw import rows_file
from workflow_scripts.tables.streams import BLOCK_VALUES
from workflow_scripts.tables.writer import write_rows

_SHAPE = (12288, 8960)  # of E2B's 262144 rows
_ROUNDS = 7
_MOST_TIME = 1.5  # of a copy's of what is read
_NAME, _TABLE = "embed_tokens_per_layer.weight", "rows"


def print_table() -> bool:
    """Print it; returns whether all that is demanded is reached."""
    with tempfile.TemporaryDirectory(prefix="bench-tables-") as home:
        seconds, of_read, of_written = compare_with_copies(Path(home), _SHAPE, _ROUNDS)
    print(
        f"{'tables':<21}{'ns/value':>10}{'copy of what is read':>22}{'ratio':>7}{'of what is written':>20}{'ratio':>7}"
    )
    print(
        f"{'int8 rows':<21}{seconds * 1e9:>10.2f}{of_read * 1e9:>22.2f}{seconds / of_read:>7.2f}"
        f"{of_written * 1e9:>20.2f}{seconds / of_written:>7.2f}",
        flush=True,
    )
    print(
        "copies read and write as many bytes as the table has in bfloat16, or in int8; demanded is the first ratio"
    )
    return all_reached(misses(seconds, of_read))


def misses(seconds: float, of_read: float) -> list[str]:
    """What is demanded and not reached."""
    return [] if seconds <= _MOST_TIME * of_read else [f"tables: at most {_MOST_TIME:g} times a copy's time"]


def compare_with_copies(home: Path, shape: tuple[int, int], rounds: int) -> list[float]:
    """Seconds per value for a table of bfloat16, for a copy of what it reads, and of what it writes; in `home`."""
    source, written, copy = home / "source.safetensors", home / rows_file(_TABLE), home / "copy"
    checkpoint = _write_source(source, shape)

    def tables() -> None:
        written.unlink(missing_ok=True)
        write_rows(checkpoint, _NAME, _TABLE, home, BLOCK_VALUES, 1)

    def copied(original: Path) -> None:
        copy.unlink(missing_ok=True)
        copy_bytes(original, copy, original.stat().st_size)

    tables()  # the first run, that compiles
    seconds = least_seconds(tables, lambda: copied(source), lambda: copied(written), rounds=rounds)
    return [of_all / (shape[0] * shape[1]) for of_all in seconds]


def _write_source(path: Path, shape: tuple[int, int]) -> Checkpoint:
    random = np.random.default_rng(0)
    with SafetensorsWriter(path, {_NAME: ("BF16", shape)}) as writer:
        for _ in range(shape[0]):
            row = random.standard_normal((1, shape[1]), np.float32) * np.float32(0.02)
            writer.append(_NAME, row.astype(ml_dtypes.bfloat16))
    return Checkpoint(None, "", path.parent, read_header(path))


if __name__ == "__main__":
    try:
        sys.exit(not print_table())
    except UserError as problem:
        sys.exit(f"error: {problem}")
