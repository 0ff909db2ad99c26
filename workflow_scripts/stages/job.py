"""What a stage's `run` is given. Apart from the runner, so that an edit of the runner rebuilds nothing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One run of a stage.

    `inputs` maps a name to a result folder (already checked) or to a plain file or folder; `digests` holds the
    digest of each; `params` is the rule's JSON; `out` is an empty folder, named as the artifact, to fill.
    """

    inputs: dict[str, Path]
    digests: dict[str, str]
    params: dict[str, Any]
    out: Path
