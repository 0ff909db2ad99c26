"""The bundles of a decoder in chunks, as the plan beside them names them."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coreai.runtime import SpecializationOptions

from workflow_scripts.coreai.chunk_host import Arrays, Call
from workflow_scripts.coreai.runtime import open_bundle
from workflow_scripts.errors import UserError

FORMAT = 1


def read_plan(path: Path) -> dict[str, Any]:
    """Read a plan. Raises UserError naming the file where it is missing or of another format."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing: without this plan the chunks beside it cannot be driven"
        ) from None
    except ValueError:
        raise UserError(f"{path} is not readable JSON: fetch it again") from None
    if not isinstance(plan, dict) or plan.get("format") != FORMAT:
        raise UserError(f"{path} is not of format {FORMAT}: fetch it again, or use the version that made it")
    return plan


@contextmanager
def open_chunks(
    plan_path: Path, options: SpecializationOptions | None = None
) -> Iterator[tuple[dict[str, Any], Call]]:
    """Load the bundles that a plan names, from the plan's own folder, for the time of the block.

    Gives the plan and a `Call` for a `ChunkHost`; each conversation takes a host of its own.
    `options` as for `open_bundle`.
    """
    plan = read_plan(plan_path)
    with ExitStack() as stack:
        bundles = [
            stack.enter_context(open_bundle(plan_path.parent / chunk["bundle"], options))
            for chunk in plan["chunks"]
        ]

        def call(number: int, inputs: Arrays) -> Arrays:
            return bundles[number].call(plan["chunks"][number]["function"], inputs)

        yield plan, call
