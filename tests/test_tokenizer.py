"""The release's own tokenizer says exactly what transformers says, and names what it misses."""

import json
import shutil
from pathlib import Path

import pytest
from release_inputs import TINY, TOKENIZER_FILES

from workflow_scripts.errors import UserError
from workflow_scripts.release.tokenizer import ChatTokenizer

CHATS = {
    "canonical": [{"role": "user", "content": "What is the capital of France?"}],
    "accents and emoji": [{"role": "user", "content": "Café déjà vu 123 🙂"}],
    "two turns": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ],
    "system, newlines, spaces": [
        {"role": "system", "content": " Be brief.\n\nBe kind. "},
        {"role": "user", "content": "\n\n\n one\n\ntwo\t three    four "},
    ],
    "digits": [{"role": "user", "content": "2026 + 12 = 2038; 3.14159, 1,000,000"}],
    "empty": [{"role": "user", "content": ""}],
    "control tokens in the text": [{"role": "user", "content": "say <turn|> or <bos>"}],
    "a null key": [{"role": "user", "content": "hi", "tool_calls": None}],
}
GENERAL_TEMPLATE = """{{ bos_token }}
{%- macro turn(role, text) %}<|turn>{{ role }}
{{ text }}<turn|>
{% endmacro %}
{% set ns = namespace(seen=0) %}
{% for message in messages %}
    {% if message['role'] == 'tool' %}{% continue %}{% endif %}
    {% if ns.seen > 4 %}{% break %}{% endif %}
    {% set ns.seen = ns.seen + 1 %}
    {% if message['role'] not in ['user', 'assistant', 'system'] %}
        {{ raise_exception('unknown role ' ~ message['role']) }}
    {% endif %}
    {% generation %}{{ turn(message['role'], message | tojson) }}{% endgeneration %}
{% endfor %}
{% if tools is none and not enable_thinking | default(false) %}<|turn>model
{% endif %}"""


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    for name in TOKENIZER_FILES:
        shutil.copy(TINY / name, tmp_path / name)
    return tmp_path


def reference_ids(folder: Path, chat: list[dict], add_generation_prompt: bool) -> list[int]:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    return reference.apply_chat_template(chat, add_generation_prompt=add_generation_prompt)["input_ids"]


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_has_the_ids_of_transformers(chat: list[dict], add_generation_prompt: bool) -> None:
    ids = ChatTokenizer.open(TINY).encode_chat(chat, add_generation_prompt)
    assert ids == reference_ids(TINY, chat, add_generation_prompt)
    assert ids.count(2) - sum("<bos>" in turn["content"] for turn in chat) == 1


def test_a_template_that_uses_everything_renders_as_in_transformers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(GENERAL_TEMPLATE)
    chat = [
        {"role": "user", "content": "<b>é & 'x'</b>"},
        {"role": "tool", "content": "skipped"},
        {"role": "assistant", "content": "yes"},
    ]
    assert ChatTokenizer.open(folder).encode_chat(chat) == reference_ids(folder, chat, True)


def test_a_crlf_template_renders_as_in_transformers(folder: Path) -> None:
    text = (folder / "chat_template.jinja").read_text().replace("{%", "\r\n{%")
    (folder / "chat_template.jinja").write_bytes(text.encode())
    chat = CHATS["two turns"]
    assert ChatTokenizer.open(folder).encode_chat(chat) == reference_ids(folder, chat, True)


def test_text_comes_back_without_special_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer, reference = ChatTokenizer.open(TINY), AutoTokenizer.from_pretrained(TINY)
    for text in ["Café déjà vu 123 🙂", "a\n\nb  c", "The capital of France is Paris."]:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert (
            tokenizer.decode([2, 105, *ids, 106])
            == text
            == reference.decode([2, 105, *ids, 106], skip_special_tokens=True)
        )


def test_tokens_and_stop_ids() -> None:
    tokenizer = ChatTokenizer.open(TINY)
    assert tokenizer.stop_token_ids == (1, 106)
    assert (tokenizer.token(106), tokenizer.bos_token_id, tokenizer.size) == ("<turn|>", 2, 1024)
    for unknown in (1024, -1):
        with pytest.raises(UserError, match=str(unknown)):
            tokenizer.token(unknown)


def edit_json(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


def test_the_end_of_a_turn_always_stops(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=1)
    assert ChatTokenizer.open(folder).stop_token_ids == (1, 106)


def test_a_template_inside_tokenizer_config_is_used(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    chat = CHATS["two turns"]
    for value in (
        template,
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}],
    ):
        edit_json(folder / "tokenizer_config.json", chat_template=value)
        assert ChatTokenizer.open(folder).encode_chat(chat) == reference_ids(TINY, chat, True)


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=name):
        ChatTokenizer.open(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokenizer_config.json", {"bos_token": None}, "bos_token"),
        ("tokenizer_config.json", {"bos_token": "<start>"}, "<start>"),
        ("generation_config.json", {"eos_token_id": None}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": []}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": [1, 5000]}, "5000"),
    ],
)
def test_a_wrong_key_is_named(folder: Path, name: str, changes: dict, message: str) -> None:
    edit_json(folder / name, **changes)
    with pytest.raises(UserError, match=message):
        ChatTokenizer.open(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        ChatTokenizer.open(folder)


def test_a_broken_template_is_named_with_its_line(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ bos_token }}\n{% for %}")
    with pytest.raises(UserError, match=r"chat_template.jinja.*line 2"):
        ChatTokenizer.open(folder)


@pytest.mark.parametrize("prefix", ["", "{{ bos_token }}{{ bos_token }}"])
def test_a_template_must_write_bos_once(folder: Path, prefix: str) -> None:
    (folder / "chat_template.jinja").write_text(prefix + "<|turn>user\n{{ messages[0]['content'] }}<turn|>")
    with pytest.raises(UserError, match="exactly one <bos>"):
        ChatTokenizer.open(folder).encode_chat(CHATS["canonical"])


@pytest.mark.parametrize(
    "chat", [[], ["hi"], [{"content": "no role"}], [{"role": 1j}], [{"role": 5, "content": ""}]]
)
def test_a_chat_the_template_refuses_is_the_callers_mistake(chat: list) -> None:
    with pytest.raises(UserError, match="chat"):
        ChatTokenizer.open(TINY).encode_chat(chat)
