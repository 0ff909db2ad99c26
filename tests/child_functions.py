"""Functions that tests call in a child process."""

import atexit
from pathlib import Path


def say_at_shutdown(note: str) -> dict:
    """Write the file `note` when the interpreter shuts down."""
    atexit.register(Path(note).write_text, "shut down")
    return {}
