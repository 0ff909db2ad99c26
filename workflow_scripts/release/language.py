"""What makes a folder a language bundle, which Core AI's language engines load: `metadata.json` and its tokenizer.

A language bundle holds one `.aimodel` that is the whole decoder, `tokenizer/`, and this file (version 0.2):

name            published name of the decoder without suffix; `assets.main` is the bundle
language        what an engine allocates and stops by; `function_map.main` lists the decoder's functions
source          where the weights come from; a local checkpoint has no `hf_` keys
compression     how the weights are stored, may be null
compilation     `targets` is empty: a device compiles the bundle when it loads it first
"""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_atomic, write_json
from workflow_scripts.release.names import METADATA, TOKENIZER
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import CONFIG, END_OF_TURN

VERSION = "0.2"
_DATE = "2026-01-01T00:00:00Z"  # readers want one; the bundles' own, so that every build gives the same bytes


def describe(
    bundle: str,
    config: TextConfig,
    origin: dict[str, str],
    language: dict[str, Any],
    stop_token_ids: list[int],
) -> dict[str, Any]:
    """The content of `metadata.json`.

    `origin` is the checkpoint's own record of where it comes from; `language` has `functions`, `max_context_length` and
    `compression`.
    """
    source = {"model_definition": "torch"}
    if origin["kind"] == "huggingface":
        source |= {"hf_model_id": origin["repository"], "hf_revision": origin["commit"]}
    return {
        "metadata_version": VERSION,
        "kind": "llm",
        "name": bundle.removesuffix(".aimodel"),
        "assets": {"main": bundle},
        "language": {
            # Readers want a text; where no repository has the tokenizer, it names the folder that does.
            "tokenizer": source.get("hf_model_id", TOKENIZER),
            "embedded_tokenizer": True,
            "vocab_size": config.vocab_size,
            "max_context_length": language["max_context_length"],
            "function_map": {"main": language["functions"]},
            "stop_token_ids": stop_token_ids,
        },
        "source": source,
        "compression": language["compression"],
        "compilation": {"date": _DATE, "targets": []},
    }


def write(folder: Path, description: dict[str, Any]) -> None:
    """Write `metadata.json`, and let the tokenizer beside it say which token ends an answer."""
    write_json(folder / METADATA, description)
    _end_with_turn(folder / TOKENIZER / CONFIG)


def _end_with_turn(path: Path) -> None:
    """Make `<turn|>` the `eos_token` of a tokenizer_config.json; all other keys stay, in their order.

    An engine stops at that one token. Bundles that were published with `<eos>` there ran on after the answer.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    before = config.get("eos_token")
    end = {**before, "content": END_OF_TURN} if isinstance(before, dict) else END_OF_TURN
    if end != before:
        write_atomic(path, json.dumps({**config, "eos_token": end}, indent=2, ensure_ascii=False) + "\n")


def check_functions(folder: Path, functions: list[str]) -> None:
    """Raise UserError where an engine, which reads no plan, would do otherwise than a host that does.

    That is where the functions that it will look for are not those of the decoder, or where it stops at other tokens,
    or has another number of positions, than the folder's plan says.
    """
    try:
        language = json.loads((folder / METADATA).read_text(encoding="utf-8"))["language"]
        named, stops = sorted(language["function_map"]["main"]), language["stop_token_ids"]
        context = language["max_context_length"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{folder / METADATA} does not say which functions the decoder has, where it stops, and how far it goes: "
            "fetch it again"
        ) from None
    if named != sorted(functions):
        raise UserError(
            f"{folder}: {METADATA} names the functions {', '.join(named)}, its decoder has "
            f"{', '.join(sorted(functions))}: fetch it again"
        )
    plan = Plan.open(folder)
    _check_same(folder, "stop_token_ids", stops, plan.stop_token_ids)
    _check_same(folder, "max_context_length", context, plan.context)
    _check_end(folder / plan.tokenizer / CONFIG)


def _check_same(folder: Path, key: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise UserError(f"{folder}: {METADATA} has {key} {found}, its plan says {expected}: fetch it again")


def _check_end(path: Path) -> None:
    """An engine stops at the tokenizer's `eos_token`, whatever else ends an answer."""
    try:
        end = json.loads(path.read_text(encoding="utf-8"))["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not say which eos_token ends an answer: fetch it again") from None
    text = end.get("content") if isinstance(end, dict) else end
    if text != END_OF_TURN:
        raise UserError(
            f"{path} has the eos_token {text}, but a turn ends with {END_OF_TURN}: fetch it again"
        )
