"""Whether a bundle and raw tables go together: another checkpoint's tables give nonsense, and nothing else notices."""

from pathlib import Path

from workflow_scripts.coreai.described import described
from workflow_scripts.errors import UserError
from workflow_scripts.tables.dump import Tables


def refuse_other_tables(bundle: Path, tables: Tables) -> None:
    """Raise UserError unless a bundle says that it is of the tables' checkpoint, and made with tables of their layout.

    A bundle that takes no table, and is made with none, may be run with either layout.
    """
    said = described(bundle)
    checkpoint, layout = str(said["checkpoint"]), said.get("tables", tables.FORMAT)
    if checkpoint != tables.meta.checkpoint:
        raise UserError(
            f"{bundle.name} is of checkpoint {checkpoint[:12]}, its tables are of "
            f"{tables.meta.checkpoint[:12]}: fetch or build both again"
        )
    if layout != tables.FORMAT:
        raise UserError(f"{bundle.name} is made for tables in {layout}, those at hand are in {tables.FORMAT}")
