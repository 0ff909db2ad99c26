"""Stage `release`: the folders of a release with its checksums, its record and its README, if the gates allow it."""

from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.release.assemble import Ingredients, assemble
from workflow_scripts.release.gate_results import read_gate, require
from workflow_scripts.stages.job import Job


def run(job: Job) -> None:
    """Fill the release.

    Inputs `folder_<name>`, `gate_<name>`, `checkpoint` and, where wanted in the record, `weights_<recipe>`.
    Parameters `model`, `slug`, `folders` (names), `required_gates` (names of `gate_<name>` inputs; the others are
    listed and may be `not_run`), `artifacts` (published name -> form, recipe, compute), `compiled` (folder -> path of
    the bundle and target of what is compiled ahead of time) and `not_built` (why that is in no folder, or null).
    """
    gate_folders = _group(job, "gate_")
    gates = {name: read_gate(name, tree) for name, tree in gate_folders.items()}
    require(job.params["required_gates"], gates)
    folders = _group(job, "folder_")
    unequal = sorted(folders.keys() ^ set(job.params["folders"]))
    if unequal:
        raise UserError(
            f"release {job.params['model']}: folder {unequal[0]} must be both an input and a parameter"
        )
    assemble(
        Ingredients(
            model=job.params["model"],
            slug=job.params["slug"],
            checkpoint=job.inputs["checkpoint"],
            folders=folders,
            weights=_group(job, "weights_"),
            gates=gates,
            gate_folders=gate_folders,
            required_gates=job.params["required_gates"],
            artifacts=job.params["artifacts"],
            compiled=job.params["compiled"],
            not_built=job.params["not_built"],
        ),
        job.out,
    )


def _group(job: Job, prefix: str) -> dict[str, Path]:
    """The inputs of one kind, by the rest of their name, sorted."""
    return {
        name.removeprefix(prefix): job.inputs[name] for name in sorted(job.inputs) if name.startswith(prefix)
    }
