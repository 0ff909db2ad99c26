"""`python -m workflow_scripts.dry_run OPTIONS`: the jobs of `snakemake --dry-run OPTIONS` as a JSON list.

What Snakemake prints of a job leaves out its memory where the rule has a message; its log records hold everything. They go to
stdout as JSON, Snakemake's own words to stderr.
"""

import contextlib
import json
import logging
import sys
from typing import Any

from snakemake.cli import main
from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent


class _Jobs(logging.Handler):
    """Collects what the plan of each job says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            self.found.append(
                {
                    "rule": record.rule_name,
                    "command": record.shellcmd,
                    "threads": record.threads,
                    "mem_mb": record.resources.get("mem_mb"),
                }
            )


def _run(options: list[str]) -> int:
    jobs = _Jobs()
    logger.addHandler(jobs)
    code = 0
    with contextlib.redirect_stdout(sys.stderr):
        try:
            main(["--dry-run", *options])
        except SystemExit as ended:
            code = int(ended.code or 0)
    json.dump(jobs.found, sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
