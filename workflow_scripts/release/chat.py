"""`chat FOLDER --prompt TEXT`: answer from a release folder alone, through the Core AI runtime."""

import argparse
import logging
import os
import sys
from pathlib import Path

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL
from workflow_scripts.release import driver
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import ChatTokenizer


def main(arguments: list[str]) -> int:
    """Print the reply alone on stdout; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts chat", description=__doc__)
    parser.add_argument("folder", type=Path, help="such as results/gemma-4-tiny/release/macos")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_argument("--max-new-tokens", type=_positive, default=256)
    options = parser.parse_args(arguments)
    TERMINAL.addHandler(
        logging.StreamHandler()
    )  # progress, on stderr: a full-size step takes seconds to minutes
    TERMINAL.setLevel(logging.INFO)
    try:
        prompt = os.fsencode(options.prompt).decode(
            "utf-8"
        )  # in a POSIX locale, Python has escaped the bytes
    except UnicodeDecodeError:
        raise UserError("the prompt is not UTF-8 text: set a UTF-8 locale, such as LANG=C.UTF-8") from None
    sys.stdout.reconfigure(encoding="utf-8")
    print(reply(options.folder, prompt, options.max_new_tokens))
    return 0


def _positive(text: str) -> int:
    """A whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("needs at least 1")
    return int(text)


def reply(folder: Path, prompt: str, new_tokens: int) -> str:
    """The greedy reply to one user message, without the stop token.

    Raises UserError where the folder is no set that can be driven, or prompt and answer do not fit its context.
    """
    plan = Plan.open(folder)
    tokenizer = ChatTokenizer.open(folder / plan.tokenizer)
    ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
    room = plan.context - len(ids) + 1  # the last id of an answer is not fed
    if room < 1:
        raise UserError(
            f"the prompt has {len(ids)} tokens, the set was exported for {plan.context} positions: shorten it"
        )
    output = isolated(
        driver.answer,
        folder=str(folder),
        prompt_ids=ids,
        new_tokens=min(new_tokens, room),
        stop_ids=plan.stop_token_ids,
    )["output"]
    text = tokenizer.decode([int(token) for token in output if token not in plan.stop_token_ids])
    if len(output) == room < new_tokens and output[-1] not in plan.stop_token_ids:
        raise UserError(
            f"the answer is not finished: with the prompt's {len(ids)} tokens it is longer than the {plan.context} "
            f"positions the set was exported for; --max-new-tokens {room} takes what fits: {text!r}"
        )
    return text
