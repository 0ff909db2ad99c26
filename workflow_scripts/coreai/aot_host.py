"""Whether this host can compile bundles ahead of time, asked while a workflow is planned."""

from workflow_scripts.coreai.xcrun import COREAI_BUILD, finds, has_xcrun
from workflow_scripts.errors import UserError

MODES = ("require", "auto", "off")

_INSTALL = (
    "install Xcode 27, select it with `sudo xcode-select -s /Applications/Xcode.app`, and fetch the compiler with "
    "`xcodebuild -downloadComponent MetalToolchain`"
)


def why_not_built(mode: str) -> str | None:
    """Why a workflow builds nothing ahead of time under `aot.mode`; None if it does. Some 10 ms.

    The reason goes into releases, so it names nothing of the host. Raises UserError where the mode is `require` and
    this host has no compiler, or there is no such mode.
    """
    if mode not in MODES:
        raise UserError(f"aot.mode `{mode}` is none of {', '.join(MODES)}")
    if mode == "off":
        return "aot.mode is off"
    missing = why_no_aot()
    if missing and mode == "require":
        raise UserError(
            f"aot.mode is `require`, but there is {missing}: {_INSTALL}; or set it to `auto`, which builds all but the "
            "bundles compiled ahead of time, to be finished on a Mac"
        )
    return missing


def aot_available() -> bool:
    """Whether this host can compile ahead of time. Some 10 ms."""
    return why_no_aot() is None


def why_no_aot() -> str | None:
    """What this host lacks to compile ahead of time; None where it lacks nothing."""
    if not has_xcrun():
        return "no xcrun on this host"
    return None if finds(COREAI_BUILD) else f"no {COREAI_BUILD} in this host's Xcode"
