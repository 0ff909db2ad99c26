"""Stages that take a known amount of memory, for the tests of what is recorded."""

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

from workflow_scripts.errors import UserError

ANONYMOUS, MAPPED, IN_CHILD, WRITTEN = 200 << 20, 300 << 20, 150 << 20, 8 << 20
_HELD_FOR = 0.5  # seconds: some samples


def allocate(job):
    """Hold anonymous memory, and a mapped file read through; write a file."""
    held = bytearray(ANONYMOUS)
    with (
        (job.inputs["mapped"]).open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):
        pages = sum(view[at] for at in range(0, len(view), mmap.PAGESIZE))
        time.sleep(_HELD_FOR)
    (job.out / "data.bin").write_bytes(bytes(WRITTEN))
    assert pages == 0 and held[-1] == 0


def start_child(job):
    """The memory is a grandchild's."""
    hold = f"import time; held = bytearray({IN_CHILD}); time.sleep({_HELD_FOR})"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}], check=True)"
    subprocess.run([sys.executable, "-c", nested], check=True)
    (job.out / "data.bin").write_bytes(b"made")


def fail(job):
    """Hold it, then stop."""
    held = bytearray(ANONYMOUS)
    time.sleep(_HELD_FOR)
    raise UserError(f"no result after {len(held)} bytes")


def main(function, *arguments):
    """Run the stage `allocator` in this process, with one of the functions above behind it."""
    import types

    from workflow_scripts import closure
    from workflow_scripts.stages import runner

    name = "workflow_scripts.stages.allocator"
    sys.modules[name] = types.SimpleNamespace(run=globals()[function])
    closure.stage_module = lambda stage: Path(__file__)
    closure.stage_code = lambda stage: {}
    closure.stage_tools = lambda stage: {}
    return runner.main(["allocator", *arguments])


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
