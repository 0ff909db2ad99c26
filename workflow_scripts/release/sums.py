"""SHA256SUMS in the format of coreutils, so that `sha256sum -c SHA256SUMS` checks a release anywhere."""

import re
from collections.abc import Mapping

from workflow_scripts.release.names import SUMS

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def format_sums(digests: Mapping[str, str]) -> str:
    """The file's text for a map from path to hex sha256, sorted by path.

    ValueError for a path with a newline or backslash, which coreutils writes in another format.
    """
    for path in digests:
        if "\n" in path or "\\" in path or "\r" in path:
            raise ValueError(f"a file name that {SUMS} cannot hold: {path!r}")
    return "".join(f"{digests[path]}  {path}\n" for path in sorted(digests))


def parse_sums(data: bytes) -> dict[str, str]:
    """Map from path to hex sha256; ValueError where the text is not exactly what `format_sums` writes."""
    lines = [_LINE.fullmatch(line) for line in data.decode().splitlines()]
    digests = {match[2]: match[1] for match in lines if match}
    if format_sums(digests).encode() != data:
        raise ValueError("not a sorted list of `<sha256>  <path>` lines")
    return digests
