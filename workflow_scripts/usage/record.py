"""The record of what a job took: `<artifact>.usage.json` beside its log. Local: no result, in no key, in no release.

A job whose result came from the store writes none and leaves the one of the last build; so a record says of which key
it is, and one of another key than the result's manifest tells nothing about it.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from workflow_scripts.files import write_json
from workflow_scripts.manifest import Manifest, manifest_path
from workflow_scripts.usage.processes import how_measured
from workflow_scripts.usage.watch import Figures

SUFFIX = ".usage.json"


@dataclass(frozen=True)
class Record:
    """What one job took. `key` and `size` (bytes of the result's files) are None where it failed; `ended` is in
    seconds since 1970."""

    stage: str
    artifact: str
    key: str | None
    size: int | None
    ended: float
    figures: Figures

    @property
    def failed(self) -> bool:
        """Whether the job came to no result."""
        return self.key is None


def record_path(log: Path) -> Path:
    """Where the record of a job with this log lies."""
    return log.with_name(log.name.removesuffix(".log") + SUFFIX)


def write_record(
    log: Path, stage: str, artifact: str, figures: Figures, key: str | None, size: int | None
) -> None:
    """Write the record of a job that ended now; `key` None says that it failed."""
    content = {
        "stage": stage,
        "artifact": artifact,
        "outcome": "failed" if key is None else "built",
        "key": key,
        "size": size,
        "ended": round(time.time(), 3),
        "measured": f"{how_measured()}; {os.cpu_count()} cores",
        **{
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in asdict(figures).items()
        },
    }
    write_json(record_path(log), content)


def read_record(path: Path) -> Record | None:
    """A record; None where there is none, or none that can be read."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        figures = Figures(**{name: raw[name] for name in Figures.__dataclass_fields__})
        return Record(*(raw[name] for name in ("stage", "artifact", "key", "size", "ended")), figures)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_records(results: Path, built: Mapping[Path, Manifest]) -> Iterator[Record]:
    """The record of how each result of a model was built, and of the last try at each that is not there.

    `built` has the path and content of every manifest of the results, see `disk.manifests`.
    """
    keys = {content.ingredients.key for content in built.values()}
    logs = results / "logs"
    for path in sorted(logs.rglob(f"*{SUFFIX}")):
        record = read_record(path)
        if record is None:
            continue
        name = path.relative_to(logs).as_posix().removesuffix(SUFFIX)
        tree = results / ("release" if name == "release/release" else name)
        if record.key in keys or (record.failed and manifest_path(tree) not in built):
            yield record
