"""The embedded checkpoint: it answers, survives 4-bit weights, and catches every known decoder mistake."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from workflow_scripts.checkpoint import tiny
from workflow_scripts.checkpoint.tiny_dialogues import DIALOGUES
from workflow_scripts.errors import UserError

FOLDER = Path(__file__).parents[1] / "resources" / "gemma-4-tiny"
FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded():
    return tiny.load_checkpoint(FOLDER)


@pytest.fixture
def model(loaded):
    """The model; a test may change its parameters and buffers, they are put back."""
    module = loaded[0]
    tensors = [*module.parameters(), *module.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    yield module
    with torch.no_grad():
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def answers(tokenizer):
    return [answer for dialogue in DIALOGUES for answer in tiny.answers_of(tokenizer, dialogue)]


@pytest.fixture(scope="module")
def batches(tokenizer):
    return tiny.build_batches(tokenizer, DIALOGUES)


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


@torch.no_grad()
def margins(model, batches) -> torch.Tensor:
    return tiny.margins_of(*tiny.answer_logits(model, batches))


# --- the folder ----------------------------------------------------------------------------------


def test_folder_is_complete_and_small():
    assert {path.name for path in FOLDER.iterdir()} == FILES
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10_000_000
    assert not [name for name in FILES - {"model.safetensors"} if b"\r" in (FOLDER / name).read_bytes()]


def test_config_is_spelled_as_published(config):
    text = config["text_config"]
    assert text["global_head_dim"] == 64
    assert text["head_dim"] == 32
    assert "per_layer_config" not in text
    assert config["vision_config"] is None
    assert config["audio_config"] is None
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 106]
    assert generation["do_sample"] is False


def test_every_signature_feature_is_there(config):
    text = config["text_config"]
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    own, shared = text["layer_types"][:first_shared], text["layer_types"][first_shared:]
    assert set(own) == set(shared) == {"sliding_attention", "full_attention"}
    assert text["num_key_value_heads"] == 1
    assert text["use_double_wide_mlp"] is True
    assert text["final_logit_softcapping"] == 30.0
    assert text["rope_parameters"]["full_attention"]["rope_type"] == "proportional"
    assert config["tie_word_embeddings"] is True


def test_embedding_scale_is_no_bf16_number(config):
    scale = math.sqrt(config["text_config"]["hidden_size"])
    assert abs(torch.tensor(scale).bfloat16().item() - scale) > 1e-3


def test_tensors_are_the_published_layout():
    with safe_open(FOLDER / "model.safetensors", "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    assert all(name.startswith("model.language_model.") for name in tensors)
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    assert not [name for name in tensors if ".layers.7." in name and ("k_proj" in name or "v_proj" in name)]
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            assert all(size % 32 == 0 for size in tensor.shape), name
        else:
            assert not (tensor == 1).all(), name
    scalars = [tensor.item() for name, tensor in tensors.items() if name.endswith("layer_scalar")]
    assert sorted(scalars) == sorted(tiny.LAYER_SCALARS)


# --- the tokenizer -------------------------------------------------------------------------------


def test_special_ids_are_gemmas(tokenizer):
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4, 105, 106]
    assert len(tokenizer) == tiny.VOCAB_SIZE
    assert tokenizer.model_max_length == 512


def test_canonical_prompt_and_answer(answers, tokenizer):
    france = answers[0]
    assert tokenizer.decode(france.prompt) == (
        "<bos><|turn>user\nWhat is the capital of France?<turn|>\n<|turn>model\n"
    )
    assert len(france.prompt) == 16
    assert len(france.ids) == 8
    assert tokenizer.decode(france.ids) == "The capital of France is Paris.<turn|>"


def test_digits_are_split(tokenizer):
    assert tokenizer.tokenize("in 1969") == ["in", "▁", "1", "9", "6", "9"]


@pytest.mark.parametrize("text", ["coração 🚀", "« até » 🌍", "Inês", "日本"])
def test_byte_fallback_round_trip(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert any(token.startswith("<0x") for token in tokenizer.convert_ids_to_tokens(ids))
    assert tokenizer.decode(ids) == text


def test_dialogues_have_the_promised_lengths(answers, config):
    window = config["text_config"]["sliding_window"]
    assert min(len(answer.prompt) for answer in answers) > window
    assert max(len(answer.ids) for answer in answers) > 256
    assert max(len(answer.prompt) + len(answer.ids) for answer in answers) < 500
    assert all(answer.ids[-1] == tiny.END_OF_TURN for answer in answers)


# --- the answers ---------------------------------------------------------------------------------


def test_every_dialogue_is_answered_exactly(model, answers):
    assert [answer.dialogue for answer in answers if not tiny.greedy_is_exact(model, answer)] == []


def test_margins_are_neither_thin_nor_fat(model, tokenizer):
    france = margins(model, [tiny.padded([tiny.labelled(tokenizer, DIALOGUES[0])])])
    assert france.min() > 2.5
    assert france.max() < 8


def int8_rows(weight: torch.Tensor) -> torch.Tensor:
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


def palettes_of_16(weight: torch.Tensor) -> torch.Tensor:
    """Lloyd's k-means from quantiles, one 16-entry palette per 32 rows."""
    groups = []
    for group in weight.numpy().reshape(-1, 32, weight.shape[1]):
        values = np.sort(group.ravel())
        sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        palette = np.quantile(values, (np.arange(16) + 0.5) / 16)
        for _ in range(10):
            edges = np.searchsorted(values, (palette[1:] + palette[:-1]) / 2)
            edges = np.concatenate([[0], edges, [values.size]])
            counts = np.diff(edges)
            palette = np.where(counts > 0, np.diff(sums[edges]) / np.maximum(counts, 1), palette)
        groups.append(palette[np.searchsorted((palette[1:] + palette[:-1]) / 2, group)])
    return torch.from_numpy(np.concatenate(groups)).float()


@pytest.mark.parametrize("recipe", [int8_rows, tiny.fake_int4, palettes_of_16], ids=lambda f: f.__name__)
def test_answers_survive_quantized_weights(model, batches, recipe):
    """Core linears, tied head, PLE table and context projection together."""
    with tiny.perturbed(tiny.weight_matrices(model), recipe):
        assert margins(model, batches).min() > 0.5


# --- mistakes of a decoder -----------------------------------------------------------------------


def norm_adds_one(text):
    for name, weight in text.named_parameters():
        if name.endswith("norm.weight"):
            weight.add_(1)


def layer_scalar_ignored(text):
    for layer in text.layers:
        layer.layer_scalar.fill_(1)


def ple_token_part_dropped(text):
    text.embed_tokens_per_layer.weight.zero_()


def ple_context_part_dropped(text):
    text.per_layer_projection_norm.weight.zero_()


def embed_scale_forgotten(text):
    text.embed_tokens.embed_scale.fill_(1)


def ple_scale_forgotten(text):
    text.embed_tokens_per_layer.embed_scale.fill_(1)


def rope_denominator_is_rotary_dim(text):
    frequencies = text.rotary_emb.full_attention_inv_freq
    rotated = int((frequencies > 0).sum())
    frequencies[:rotated] = 1e6 ** (-torch.arange(rotated) / rotated)


MISTAKES: list[Callable] = [
    norm_adds_one,
    layer_scalar_ignored,
    ple_token_part_dropped,
    ple_context_part_dropped,
    embed_scale_forgotten,
    ple_scale_forgotten,
    rope_denominator_is_rotary_dim,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda f: f.__name__)
def test_mistake_changes_a_token(model, batches, mistake):
    with torch.no_grad():
        mistake(model.model.language_model)
    assert margins(model, batches).min() < 0


def test_wrong_sliding_producer_changes_a_token(model, batches):
    layers = model.model.language_model.layers
    wrong, right = layers[2].self_attn, layers[3].self_attn
    assert right.store_full_length_kv
    try:
        wrong.store_full_length_kv, right.store_full_length_kv = True, False
        assert margins(model, batches).min() < 0
    finally:
        wrong.store_full_length_kv, right.store_full_length_kv = False, True


@pytest.mark.parametrize("window", [7, 9, 512])
def test_wrong_window_changes_a_token(model, batches, window):
    text = model.model.language_model.config
    try:
        text.sliding_window = window
        assert margins(model, batches).min() < 0
    finally:
        text.sliding_window = 8


# --- the training --------------------------------------------------------------------------------


def test_training_is_deterministic(tmp_path):
    plan = tiny.Plan(steps=2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        tiny.train_into(tmp_path / name, plan, DIALOGUES[:2])
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="did not write"):
        tiny.train_tiny_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
