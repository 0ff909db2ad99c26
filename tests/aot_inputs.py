"""A bundle as far as a compiler's stand-in reads it, and the stand-in itself."""

import hashlib
import os
from pathlib import Path

FAKES = Path(__file__).parent / "fakes"
NO_XCRUN = "none"


def pretend_xcrun(monkeypatch, behaviour, **more):
    """Put `fakes/xcrun` first and choose what it does, see there; `none` makes a host without any xcrun."""
    folders = [
        place for place in os.environ["PATH"].split(os.pathsep) if not (Path(place) / "xcrun").exists()
    ]
    if behaviour != NO_XCRUN:
        folders.insert(0, str(FAKES))
        monkeypatch.setenv("FAKE_XCRUN", behaviour)
        for name, value in more.items():
            monkeypatch.setenv(f"FAKE_XCRUN_{name.upper()}", str(value))
    monkeypatch.setenv("PATH", os.pathsep.join(folders))


def write_bundle(folder, stem="gemma4_tiny_core", program=b"the program of a bundle"):
    """A folder `STEM.aimodel` with the three files of a bundle, of which none is real."""
    bundle = folder / f"{stem}.aimodel"
    bundle.mkdir(parents=True)
    (bundle / "main.mlirb").write_bytes(program)
    (bundle / "main.hash").write_bytes(hashlib.sha256(program).digest())
    (bundle / "metadata.json").write_text('{"assetVersion": "2.0"}')
    return bundle
