"""The oracle: Hugging Face transformers, eager attention, float32, greedy, one token at a time through its cache."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Gemma4ForCausalLM, Gemma4TextConfig

from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.gates.oracle import FORMAT, LONG_RUN
from workflow_scripts.progress import track, working

_LOG = logging.getLogger(__name__)
_PLE_TABLE = "embed_tokens_per_layer.weight"


@dataclass(frozen=True)
class Request:
    """One dialogue of the config (see config/README.md, `oracle.dialogues`)."""

    name: str
    new_tokens: int
    turns: tuple[str, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    expect_text: str | None = None
    expect_ids: tuple[int, ...] | None = None
    stops: bool = False
    numbers: bool = False
    skip_ties: bool = False


@dataclass(frozen=True)
class Greedy:
    """A greedy run: prompt and output ids; of every fed position its logits and the hidden state before the head."""

    prompt_ids: list[int]
    output_ids: list[int]
    logits: np.ndarray
    hidden: np.ndarray

    def margins(self) -> np.ndarray:
        """Top-2 margin of the logits that chose each output id."""
        rows = self.logits[len(self.prompt_ids) - 1 :]
        top = np.partition(rows, -2, axis=1)
        return top[:, -1] - top[:, -2]


class _MappedRows(torch.nn.Module):
    """The per-layer embedding table left on disk: 9.4 GB in float32 for E2B, of which a step needs one row."""

    def __init__(self, checkpoint: Checkpoint, scale: torch.Tensor) -> None:
        super().__init__()
        self.checkpoint, self.scale = checkpoint, scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        rows = self.checkpoint.float32(_PLE_TABLE, input_ids.reshape(-1).numpy())
        return torch.from_numpy(rows).reshape(*input_ids.shape, -1) * self.scale


def load_model(checkpoint: Checkpoint) -> Gemma4ForCausalLM:
    """The checkpoint's text model in float32, eager; every parameter is loaded or the load fails."""
    config = _hf_config(checkpoint.config)
    names = [name for name in checkpoint.names() if name != _PLE_TABLE]
    state = {f"model.{name}": torch.from_numpy(checkpoint.float32(name)) for name in names}
    state[f"model.{_PLE_TABLE}"] = torch.from_numpy(checkpoint.float32(_PLE_TABLE, slice(0, 1)))
    model, info = Gemma4ForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    if problems := {kind: sorted(keys) for kind, keys in info.items() if keys}:
        raise UserError(f"transformers did not load the checkpoint's text model completely: {problems}")
    model.model.embed_tokens_per_layer = _MappedRows(
        checkpoint, model.model.embed_tokens_per_layer.embed_scale
    )
    return model.eval()


def _hf_config(config: TextConfig) -> Gemma4TextConfig:
    """The canonical configuration in transformers' words.

    Not read from config.json: of some spellings that the checkpoint room accepts, such as flat RoPE fields,
    transformers silently takes its own defaults instead.
    """
    fields = config.to_json()
    rope, eos = fields.pop("rope"), fields.pop("eos_token_ids")
    parameters = {
        kind: {"rope_theta": spec["theta"], "rope_type": spec["rope_type"]}
        | ({"partial_rotary_factor": spec["partial_rotary_factor"]} if spec["rope_type"] != "default" else {})
        for kind, spec in rope.items()
    }
    one_row = {"vocab_size_per_layer_input": 1}  # the table is replaced by the one on disk
    return Gemma4TextConfig(**{**fields, **one_row}, rope_parameters=parameters, eos_token_id=eos)


@torch.no_grad()
def greedy(model: Gemma4ForCausalLM, prompt_ids: list[int], new_tokens: int, stop_ids: set[int]) -> Greedy:
    """Feed the prompt one id at a time, then the model's own choices, up to a stop id or `new_tokens` of them."""
    cache, rows, fed, output = None, [], list(prompt_ids), []
    hidden: list[np.ndarray] = []
    hook = model.lm_head.register_forward_pre_hook(
        lambda head, given: hidden.append(given[0][0, -1].numpy().copy())
    )
    most = len(prompt_ids) + new_tokens - 1
    positions = track(range(most), "position, at most", most)
    while len(output) < new_tokens and not (output and output[-1] in stop_ids):
        token = fed[next(positions)]
        step = model(input_ids=torch.tensor([[token]]), cache=cache, use_cache=True)
        cache = step.cache
        rows.append(step.logits[0, -1].numpy().copy())
        if len(rows) >= len(prompt_ids):
            output.append(int(rows[-1].argmax()))
            fed.append(output[-1])
    positions.close()
    hook.remove()
    return Greedy(list(prompt_ids), output, np.stack(rows), np.stack(hidden))


def build_oracle(
    checkpoint: Checkpoint, requests: list[Request], min_margin: float, out: Path, context: int | None = None
) -> None:
    """Run every dialogue and write the result of stage `oracle`.

    Raises UserError where a gated position's margin is under `min_margin`, an expected text or id differs, or, before
    the model is loaded, where a dialogue cannot fit `context` positions.
    """
    torch.set_num_threads(1)  # a step is one row: threads cost more than they give
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.source)
    for request in requests:
        _check_room(request, len(_least_prompt(tokenizer, request)), context)
    with working("load the original model"):
        model = load_model(checkpoint)
    stops = set(checkpoint.config.eos_token_ids)
    dialogues: dict[str, Any] = {}
    margins: dict[str, list[float]] = {}
    arrays: dict[str, np.ndarray] = {}
    for name in track([request.name for request in requests], "dialogue", len(requests)):
        request = next(request for request in requests if request.name == name)
        run, messages = _answer(model, tokenizer, request, stops, context)
        text = _text(tokenizer, run.output_ids)
        _check_expected(request, run, text, stops)
        found = run.margins()
        margins[name] = [round(float(value), 4) for value in found]
        dialogues[name] = {
            "messages": messages,
            "prompt_ids": run.prompt_ids,
            "output_ids": run.output_ids,
            "gated": _gated(request, run, found, min_margin),
            "stops": request.stops,
            "numbers": request.numbers,
            "text": text,
        }
        _LOG.info("%s: %d ids, least margin %.3f: %r", name, len(run.output_ids), found.min(), text)
        if request.numbers:
            arrays[name] = run.logits
        if len(run.logits) >= LONG_RUN:
            arrays[f"{name}.hidden"] = run.hidden
    record = {
        "format": FORMAT,
        "checkpoint": checkpoint.digest,
        "min_margin": min_margin,
        "dialogues": dialogues,
    }
    write_json(out / "oracle.json", record)
    write_json(out / "measured.json", {"margins": margins})
    with (out / "measured.npz").open("wb") as stream:
        np.savez(stream, **arrays)


def _answer(
    model: Gemma4ForCausalLM, tokenizer: Any, request: Request, stops: set[int], context: int | None
) -> tuple[Greedy, list[dict[str, str]]]:
    """Play the dialogue; earlier answers of the model become part of the last prompt, whose messages come back too."""
    messages: list[dict[str, str]] = []
    if request.prompt_ids:
        return greedy(model, list(request.prompt_ids), request.new_tokens, stops), messages
    for turn in request.turns:
        messages.append(_message("user", turn))
        prompt = _encode_chat(tokenizer, messages)
        _check_room(request, len(prompt), context)
        run = greedy(model, prompt, request.new_tokens, stops)
        messages.append(_message("assistant", _text(tokenizer, run.output_ids)))
    return run, messages[:-1]


def _least_prompt(tokenizer: Any, request: Request) -> list[int]:
    """The last prompt with nothing in the place of earlier answers, which only the model can give."""
    if request.prompt_ids:
        return list(request.prompt_ids)
    messages = [
        _message(role, text) for turn in request.turns for role, text in (("user", turn), ("assistant", ""))
    ]
    return _encode_chat(tokenizer, messages[:-1])


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Text of an answer without special tokens, and with nothing tidied: it is compared exactly."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _check_room(request: Request, prompt: int, context: int | None) -> None:
    """Refuse what a kv_cache of `context` positions cannot hold; the last new id is not fed."""
    fed = prompt + request.new_tokens - 1
    if context is not None and fed > context:
        raise UserError(
            f"oracle dialogue `{request.name}`: a prompt of {prompt} tokens and new_tokens: {request.new_tokens} feed "
            f"{fed} positions, but context is {context}: raise context, or ask for fewer tokens"
        )


def _check_expected(request: Request, run: Greedy, text: str, stops: set[int]) -> None:
    where = f"oracle dialogue `{request.name}`"
    if request.expect_ids is not None and run.output_ids != list(request.expect_ids):
        raise UserError(
            f"{where}: the checkpoint answers ids {run.output_ids}, expected {list(request.expect_ids)}: "
            "these are not the weights that the config was written for"
        )
    if request.expect_text is not None and text != request.expect_text:
        raise UserError(f"{where}: the checkpoint answers {text!r}, expected {request.expect_text!r}")
    if request.stops and run.output_ids[-1] not in stops:
        raise UserError(
            f"{where}: no stop token within {request.new_tokens} new tokens: raise new_tokens or drop `stops`"
        )


def _gated(request: Request, run: Greedy, margins: np.ndarray, min_margin: float) -> list[int]:
    """Indices of the output ids that are gated; a close call is refused, or left out where the config says so."""
    close = np.flatnonzero(margins < min_margin)
    if close.size and not request.skip_ties:
        index = int(close[0])
        raise UserError(
            f"oracle dialogue `{request.name}`: the margin {margins[index]:.4f} at position "
            f"{len(run.prompt_ids) - 1 + index} is under {min_margin}, too close for a gate: "
            "choose another prompt, fewer new_tokens, or set skip_ties"
        )
    return [index for index in range(len(run.output_ids)) if margins[index] >= min_margin]
