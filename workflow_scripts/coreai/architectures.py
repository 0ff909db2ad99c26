"""What a bundle can be compiled for ahead of time, as data, and what is known to be wrong with a target.

Apple lists neither the architectures nor what they are. The names are those that `coreai-build` itself took: nine for
iOS (the release candidate of Xcode 27) and, of its twenty for macOS, the sixteen that a published probe of
`coreai-build` 3600.79.1 names. The number follows the device identifier (`iPhone18,1`), not the marketing name, and the
compiler ends with 0 for an architecture that the device then refuses to load: only this table stands before that.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "iOS": ("h13g", "h14g", "h15g", "h16g", "h16p", "h17g", "h17p", "h18p", "h19p"),
    "macOS": (
        *("h13g", "h13s", "h13c", "h14g", "h14s", "h14c", "h15g", "h15s", "h15c"),
        *("h16g", "h16s", "h16c", "h17p", "h17g", "h17s", "h17c"),
    ),
}
"""Platform -> its architectures. The last letter: p a phone's chip, g an iPad's or a Mac's, s and c its larger ones."""

TOO_OLD = ("h11p", "h11g", "h12p", "h13p", "h14p", "h15p")
"""Names that the compiler knows, of phones and iPads without Apple Intelligence: nothing is compiled ahead for them."""

COMPUTE = ("gpu", "neural-engine", "none")
"""What the compiler can be asked to prefer."""

OLDEST_DEPLOYMENT = "27.0"  # Core AI begins with it, on every platform

_VERSION = re.compile(r"(\d+)\.(\d+)", re.ASCII)


@dataclass(frozen=True)
class Device:
    """One device: Apple's identifier, its name, what it is compiled for, and how this is known."""

    identifier: str
    name: str
    platform: str
    architecture: str
    evidence: str


DEVICES = (
    Device(
        "iPhone16,1", "iPhone 15 Pro", "iOS", "h16p", "it printed AIModel.deviceArchitectureName (published)"
    ),
    Device("iPhone18,1", "iPhone 17 Pro", "iOS", "h18p", "loads and runs it, refuses h17p (published)"),
    Device("iPhone19,2", "iPhone 18 Pro", "iOS", "h19p", "loads and runs it, refuses h18p (published)"),
    Device("Mac16,9", "Mac with M4 Max", "macOS", "h16c", "the only one of twenty that loads (published)"),
)


@dataclass(frozen=True)
class Target:
    """What to compile one bundle for. The fields are the keys of the configuration and the stage's parameters.

    `min_deployment_version` is the oldest system, `27.0`; `expect_frequent_reshapes` hints that input shapes change
    from call to call.
    """

    platform: str
    architecture: str
    preferred_compute: str
    min_deployment_version: str
    expect_frequent_reshapes: bool

    def __str__(self) -> str:
        return f"{self.platform} {self.architecture} ({self.preferred_compute})"


def artifact_name(stem: str, target: Target) -> str:
    """The published name of what becomes of `STEM.aimodel`: a folder with the compiled bundle in it."""
    return f"{stem}_aotc_{target.architecture}"


def compiled_name(stem: str, target: Target) -> str:
    """The compiled bundle's name, as the compiler chooses it and apps look for it."""
    return f"{stem}.{target.architecture}.aimodelc"


def devices_of(target: Target) -> list[str]:
    """Names of the devices that are known to load it; empty where nobody published one."""
    wanted = (target.platform, target.architecture)
    return [device.name for device in DEVICES if (device.platform, device.architecture) == wanted]


def target_problems(target: Target, *, linear_int4: bool, dynamic: bool, kernels: bool) -> list[str]:
    """What is known to go wrong when a graph is compiled for a target; empty where nothing is.

    `linear_int4`: it holds 4-bit codes with a step per block; `dynamic`: a dimension of its inputs or states may
    change from call to call; `kernels`: it holds Metal kernels.
    """
    return own_problems(target) + _graph_problems(target, linear_int4, dynamic, kernels)


def own_problems(target: Target) -> list[str]:
    """What is wrong with a target whatever the graph is."""
    problems = []
    if target.platform not in ARCHITECTURES:
        problems.append(f"platform `{target.platform}` is none of {', '.join(ARCHITECTURES)}")
    elif target.architecture not in ARCHITECTURES[target.platform]:
        problems.append(_architecture_problem(target))
    if target.preferred_compute not in COMPUTE:
        problems.append(f"preferred_compute `{target.preferred_compute}` is none of {', '.join(COMPUTE)}")
    version = _VERSION.fullmatch(target.min_deployment_version)
    if version is None:
        problems.append(
            f"min_deployment_version `{target.min_deployment_version}` is no version such as `{OLDEST_DEPLOYMENT}`"
        )
    elif int(version[1]) < int(OLDEST_DEPLOYMENT.partition(".")[0]):
        problems.append(
            f"min_deployment_version {target.min_deployment_version} is before {OLDEST_DEPLOYMENT}, with which Core AI "
            "begins"
        )
    return problems


def clashes(targets: Sequence[Target]) -> list[str]:
    """Architectures that stand in several targets of one artifact: what is compiled for them would share a name."""
    names = [target.architecture for target in targets]
    return sorted({name for name in names if names.count(name) > 1})


def _architecture_problem(target: Target) -> str:
    """Why an architecture does not belong to a platform that there is."""
    platform, name = target.platform, target.architecture
    device = next((one for one in DEVICES if name in (one.identifier, one.name)), None)
    if device is not None:
        return f"`{name}` is a device, whose architecture is {device.architecture} ({device.platform})"
    if name in TOO_OLD:
        return (
            f"architecture {name} is of a device without Apple Intelligence, which loads nothing that was compiled "
            "ahead of time: give it the .aimodel"
        )
    known = ARCHITECTURES[platform]
    others = [other for other, names in ARCHITECTURES.items() if name in names]
    if others:
        return f"architecture {name} belongs to {others[0]}, not to {platform}: {platform} has {', '.join(known)}"
    return (
        f"there is no architecture `{name}`: {platform} has {', '.join(known)} (on a device "
        "AIModel.deviceArchitectureName tells its own; a new one is an entry of coreai/architectures.py)"
    )


def _graph_problems(target: Target, linear_int4: bool, dynamic: bool, kernels: bool) -> list[str]:
    problems = []
    if target.preferred_compute == "neural-engine":
        # All three were published: the compiler ends with 0 and what it wrote runs on the GPU.
        if linear_int4:
            problems.append(
                "linear 4-bit weights do not compile for the Neural Engine, it falls back to the GPU without a word: "
                "use a palette recipe or prefer gpu"
            )
        if dynamic:
            problems.append(
                "a graph with changing shapes is not compiled for the Neural Engine, whatever is preferred: prefer gpu"
            )
        if kernels:
            problems.append("Metal kernels run on the GPU only: prefer gpu")
    if target.expect_frequent_reshapes and not dynamic:
        problems.append(
            "expect_frequent_reshapes on a graph whose shapes never change crashes on the device when it is loaded: "
            "set it to false"
        )
    return problems
