"""Raw tables of either layout, by what their `meta.json` says."""

from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.tables.dump import META, Tables, read_object
from workflow_scripts.tables.int4 import Int4Tables
from workflow_scripts.tables.raw import RawTables

_INT4, _INT8 = Int4Tables.FORMAT, RawTables.FORMAT


def open_tables(folder: Path) -> Tables:
    """Map a dump. Raises UserError for a format of another version, and as the reader of the layout does."""
    found = read_object(folder / META).get("format")
    if found is None:  # published dumps in int8 do not say so
        return RawTables.open(folder)
    if found == _INT4:
        return Int4Tables.open(folder)
    raise UserError(
        f"{folder / META}: format is {found!r}, this version reads {_INT4}, or {_INT8} without the key"
    )
