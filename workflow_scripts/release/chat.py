"""`chat FOLDER --prompt TEXT`: answer from a release folder alone, through the Core AI runtime."""

import argparse
import logging
import os
import sys
from pathlib import Path

import numpy as np

from workflow_scripts.coreai.isolated import isolated
from workflow_scripts.errors import UserError
from workflow_scripts.progress import TERMINAL
from workflow_scripts.release import driver
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import ChatTokenizer

ANSWER = "answer"


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
    found = isolated(converse, folder=str(folder), dialogues={"chat": [prompt]}, new_tokens=new_tokens)
    output = found[f"chat.{ANSWER}0"].tolist()
    text = ChatTokenizer.open(folder / plan.tokenizer).decode(without_stop(output, plan))
    room = room_for(plan, found["chat.prompt0"].tolist())
    if len(output) == room < new_tokens and output[-1] not in plan.stop_token_ids:
        raise UserError(
            f"the answer is not finished: with the prompt's {len(found['chat.prompt0'])} tokens it is longer than the "
            f"{plan.context} positions the set was exported for; --max-new-tokens {room} takes what fits: {text!r}"
        )
    return text


def converse(folder: str, dialogues: dict[str, list[str]], new_tokens: int) -> dict[str, np.ndarray]:
    """Answer every turn of some dialogues, given by what the user says (for `isolated`).

    `NAME.prompt0` are the ids of the first turn's prompt, `NAME.answer0` those of the set's own answer to it, the stop
    id included where one was reached, and so on; an answer stands in the next turn's prompt. Raises UserError
    where a prompt does not fit.
    """
    plan = Plan.open(Path(folder))
    tokenizer = ChatTokenizer.open(Path(folder) / plan.tokenizer)
    found: dict[str, np.ndarray] = {}
    with driver.open_set(Path(folder)) as bundles:
        driver.say_replaced(bundles)
        for name, turns in dialogues.items():
            conversation = driver.Conversation(bundles, plan.stop_token_ids)
            messages: list[dict[str, str]] = []
            for number, turn in enumerate(turns):
                messages.append({"role": "user", "content": turn})
                prompt = tokenizer.encode_chat(messages)
                output = conversation.answer(prompt, min(new_tokens, room_for(plan, prompt)))
                text = tokenizer.decode(without_stop(output, plan))
                messages.append({"role": "assistant", "content": text})
                found |= {
                    f"{name}.prompt{number}": np.array(prompt),
                    f"{name}.{ANSWER}{number}": np.array(output),
                }
    return found


def room_for(plan: Plan, prompt: list[int]) -> int:
    """How many ids an answer to a prompt can have; its last one is not fed. Raises UserError where none can."""
    room = plan.context - len(prompt) + 1
    if room < 1:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, the set was exported for {plan.context} positions: shorten it"
        )
    return room


def without_stop(output: list[int], plan: Plan) -> list[int]:
    """The ids of an answer that are text."""
    return [token for token in output if token not in plan.stop_token_ids]
