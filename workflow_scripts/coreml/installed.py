"""Whether this environment has coremltools, asked before any work; nothing is imported for it."""

import importlib.metadata

VERSION = "9.0"
"""The one that the conversion was checked with; `envs/coreml.txt` pins it."""


def why_no_coremltools() -> str | None:
    """What is missing and how to get it; None where all is there."""
    try:
        found = importlib.metadata.version("coremltools")
    except importlib.metadata.PackageNotFoundError:
        found = "no coremltools"
    if found == VERSION:
        return None
    return (
        f"the Core ML reference needs coremltools {VERSION}, which is an extra, and this environment has {found}: run "
        "`make environment-coreml`, or `pip install -r envs/requirements.txt -r envs/coreml.txt`"
    )
