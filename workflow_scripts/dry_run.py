"""`python -m workflow_scripts.dry_run OPTIONS`: the jobs of `snakemake --dry-run OPTIONS` as a JSON list.

What Snakemake prints of a job leaves out its memory where the rule has a message; its log records hold everything. The
list goes to stdout, Snakemake's own words to stderr.
"""

import contextlib
import json
import logging
import sys
from typing import Any

from snakemake.cli import main
from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent


def _run(options: list[str]) -> int:
    jobs: list[dict[str, Any]] = []

    def collect(record: logging.LogRecord) -> bool:
        if getattr(record, "event", None) == LogEvent.JOB_INFO:
            memory = record.resources.get("mem_mb")
            jobs.append({"command": record.shellcmd, "threads": record.threads, "mem_mb": memory})
        return True

    logger.addFilter(collect)  # a handler would not do: Snakemake begins by removing those that are there
    code = 0
    with contextlib.redirect_stdout(sys.stderr):
        try:
            main(["--dry-run", *options])
        except SystemExit as ended:
            code = int(ended.code or 0)
    json.dump(jobs, sys.stdout)
    return code


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
