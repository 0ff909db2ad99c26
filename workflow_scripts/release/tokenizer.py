"""Chat text to token ids and back, from the tokenizer files of a release folder alone.

Only `tokenizers` and `jinja2` are needed. The rendering follows what `apply_chat_template` of Hugging Face
transformers does (transformers/utils/chat_template_utils.py), since chat templates are written against it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError

TOKENIZER, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
END_OF_TURN = "<turn|>"


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with its chat template; `open` makes one.

    `stop_token_ids` are the ids that end an answer: those of generation_config.json, and always `<turn|>`.
    """

    folder: Path
    stop_token_ids: tuple[int, ...]
    bos_token_id: int
    _tokenizer: Tokenizer
    _template: Template
    _special: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> "ChatTokenizer":
        """Read tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a folder.

        The template is chat_template.jinja or, without that file, the key `chat_template` of
        tokenizer_config.json. Raises UserError naming the file or key that is missing or wrong.
        """
        config = _read_json(folder / CONFIG)
        special = _named_tokens(config)
        tokenizer = _read_tokenizer(folder / TOKENIZER)
        extra = config.get("extra_special_tokens")
        listed = [*special.values(), *(extra if isinstance(extra, list) else [])]
        # The configuration may call tokens special that tokenizer.json only has in its vocabulary.
        tokenizer.add_special_tokens([token for token in listed if tokenizer.token_to_id(token) is not None])
        if "bos_token" not in special:
            raise UserError(f"{folder / CONFIG} has no key `bos_token`, which the chat template writes")
        return cls(
            folder=folder,
            stop_token_ids=_stop_ids(folder, tokenizer),
            bos_token_id=_known_id(tokenizer, special["bos_token"], folder),
            _tokenizer=tokenizer,
            _template=_compile(*read_template(folder)),
            _special=special,
        )

    @property
    def size(self) -> int:
        """One more than the highest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The chat as the template writes it: text with <bos> and the turn marks."""
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise UserError("a chat is a list of at least one message, each with a `role` and its `content`")
        try:
            plain = json.loads(
                json.dumps(list(messages))
            )  # the template comes with the checkpoint: data only
            chat = [{key: value for key, value in turn.items() if value is not None} for turn in plain]
            return self._template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except (TemplateError, TypeError, ValueError, AttributeError) as problem:
            raise UserError(f"the chat template of {self.folder} refuses this chat: {problem}") from None

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat, from <bos> on; with `add_generation_prompt` up to where the model's turn begins.

        `messages` are `{"role": "user" | "assistant" | "system", "content": text}`. Raises UserError where the
        template refuses them or does not begin with exactly one <bos>: without it Gemma's answers fall apart.
        """
        ids = self.encode(self.render_chat(messages, add_generation_prompt))
        if ids[:1] != [self.bos_token_id] or ids[1:2] == [self.bos_token_id]:
            raise UserError(
                f"the chat template of {self.folder} must begin with exactly one {self._special['bos_token']}"
            )
        return ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        """The token of an id as tokenizer.json spells it."""
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise UserError(f"{self.folder / TOKENIZER} has no token with id {token_id}")
        return token


def read_template(folder: Path) -> tuple[str, Path]:
    """The chat template's source and the file it is in; UserError where there is none."""
    path = folder / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8"), path
    source = _read_json(folder / CONFIG).get("chat_template")
    if isinstance(source, list):  # older checkpoints store several named templates
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str) or not source.strip():
        raise UserError(
            f"{folder} has no chat template: neither {TEMPLATE} nor a key `chat_template` in {CONFIG}; "
            f"fetch {TEMPLATE} of the checkpoint too (download patterns such as *.json leave it out)"
        )
    return source, folder / CONFIG


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: a chat needs it; fetch it with the checkpoint") from None
    except ValueError as problem:
        raise UserError(f"{path} is no readable JSON: {problem}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UserError(f"{path} is missing: a chat needs it; fetch it with the checkpoint")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as problem:  # the library raises bare Exception
        raise UserError(f"{path} is no readable tokenizer: {problem}") from None
    tokenizer.no_truncation()  # a saved state of training would silently shorten or pad the prompt
    tokenizer.no_padding()
    return tokenizer


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Every `..._token` of tokenizer_config.json with its text, as templates use them."""
    entries = dict(config)
    for group in ("extra_special_tokens", "model_specific_special_tokens"):
        if isinstance(config.get(group), dict):
            entries |= config[group]
    texts = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in entries.items()
    }
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def _stop_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    path = folder / GENERATION
    value = _read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in ids):
        raise UserError(f"{path}: `eos_token_id` must be an id or a list of ids, not {value!r}")
    for entry in ids:
        if entry < 0 or tokenizer.id_to_token(entry) is None:
            raise UserError(f"{path}: `eos_token_id` {entry} is no id of {TOKENIZER}")
    # A chat turn of Gemma 4 ends with <turn|>; releases whose list had only <eos> ran on after the answer.
    return tuple(dict.fromkeys([*ids, _known_id(tokenizer, END_OF_TURN, folder)]))


def _known_id(tokenizer: Tokenizer, token: str, folder: Path) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise UserError(
            f"{folder / TOKENIZER} has no token {token}: it is not the tokenizer of a Gemma 4 chat model"
        )
    return token_id


def _compile(source: str, path: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as problem:
        raise UserError(f"{path}: chat template, line {problem.lineno}: {problem.message}") from None


class _GenerationBlock(Extension):
    """`{% generation %}` marks the model's own words for training; for reading, its body is all there is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Give the block's body as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def check_vocabulary(tokenizer: ChatTokenizer, config: TextConfig) -> None:
    """Raise UserError where the tokenizer has ids without an embedding, or another <bos> than the model."""
    found, expected = (tokenizer.size, tokenizer.bos_token_id), (config.vocab_size, config.bos_token_id)
    if found[0] > expected[0] or found[1] != expected[1]:
        raise UserError(
            f"tokenizer.json has {found[0]} ids and <bos> {found[1]}, but the model has vocab_size "
            f"{expected[0]} and bos_token_id {expected[1]}: it belongs to another checkpoint"
        )
