"""The GPU of this host, as the Core AI runtime of the system offers it."""

import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coreai.runtime import SpecializationOptions


def why_no_gpu() -> str | None:
    """Why no bundle can run on a GPU here; None where one can."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        # The reason goes into the release, so it does not name the host: all hosts without Metal give the same bytes.
        return "this host has no Metal: kernels run under macOS 27 on Apple silicon only"
    from coreai.runtime import SpecializationOptions

    # The runtime inside of the Python package has no GPU (coreai/runtime/_specialization_options.py).
    if not SpecializationOptions.is_supported():
        return "the Core AI runtime of macOS is not used: it needs macOS 27, and USE_LOCAL_COREAI must not be set"
    return None


def gpu_options() -> "SpecializationOptions":
    """Options under which a bundle is loaded for the GPU; only where `why_no_gpu` is None."""
    from coreai.runtime import ComputeUnitKind, SpecializationOptions

    return SpecializationOptions.from_preferred_compute_unit_kind(ComputeUnitKind.gpu())
