"""Whether this environment has coremltools, and the system Core ML; nothing is imported to tell."""

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


def why_no_core_ml(macos: str) -> str | None:
    """Why a system cannot run the package; None where it can."""
    if macos == "none":
        return "this host has no Core ML: it comes with macOS"
    if int(macos.partition(".")[0]) < 15:
        return f"this host has macOS {macos}: Core ML has states since macOS 15"
    return None
