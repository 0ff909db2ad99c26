"""Command line: `python -m workflow_scripts COMMAND ...`; without one it lists them."""

import os
import sys

from workflow_scripts.errors import UserError

_USAGE = """usage: python -m workflow_scripts COMMAND ...

  chat FOLDER --prompt TEXT   answer from a release folder alone, through the Core AI runtime
  verify RELEASE [--rebuild]  re-hash a release, name every file that differs; --rebuild also builds it again
  publish RELEASE --repo OWNER/NAME [--yes]   upload a release to the Hugging Face Hub; without --yes a dry run
  plan [TARGET]               jobs, bytes, memory and time of a run, and what is there already
  why [TARGET]                what a run would rebuild, and which ingredient differs from the last build
  store list|size|prune|verify   the store of results
  usage [results/MODEL]       what each job took, and what the results hold on the disk
  summary results/MODEL       folders, gates and times of a release, as at the end of a run
  pages results/MODEL OUT     pages and figures of the report (what `snakemake report` calls)
  doctor                      what works on this host and what will not
  stage NAME ...              run one stage (what the rules call)
"""


def main(arguments: list[str]) -> int:
    """Dispatch to a command; each imports only what it needs."""
    command, *rest = arguments or [""]
    match command:
        case "stage":
            from workflow_scripts.stages import runner as module
        case "chat":
            from workflow_scripts.release import chat as module
        case "verify":
            from workflow_scripts.release import verify as module
        case "publish":
            from workflow_scripts.release import publish as module
        case "plan":
            from workflow_scripts.plan import command as module
        case "why":
            from workflow_scripts import why as module
        case "store":
            from workflow_scripts.store import command as module
        case "usage":
            from workflow_scripts.usage import command as module
        case "summary":
            from workflow_scripts.report import summary as module
        case "pages":
            from workflow_scripts.report import pages as module
        case "doctor":
            from workflow_scripts import doctor as module
        case _:
            print(_USAGE, file=sys.stderr, end="")
            return 0 if command in ("-h", "--help") else 2
    try:
        code = module.main(rest)
        sys.stdout.flush()
        return code
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    except (
        BrokenPipeError
    ):  # `... | head`: the reader has seen enough, and Python's last flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as problem:  # a full disk, a missing permission: nothing that a traceback explains
        place = f"{problem.filename}: " if problem.filename else ""
        print(f"error: {place}{problem.strerror or problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
