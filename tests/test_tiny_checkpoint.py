"""The embedded checkpoints: they answer, survive 4-bit weights, and catch every known decoder mistake.

Most is about the default one; the last part is about what the other has beyond it: the shape of E4B, and a 4-bit grid.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers.models.gemma4 import modeling_gemma4

from workflow_scripts.checkpoint import tiny
from workflow_scripts.checkpoint.tiny_dialogues import DIALOGUES
from workflow_scripts.checkpoint.tiny_grid import on_grid
from workflow_scripts.checkpoint.tiny_shapes import E2B, E4B_QAT, SHAPES
from workflow_scripts.errors import UserError
from workflow_scripts.quantize.linear import quantize_linear
from workflow_scripts.quantize.qat_grid import recover_grid

FOLDER = Path(__file__).parents[1] / "resources" / "gemma-4-tiny"
QAT_FOLDER = FOLDER.with_name("gemma-4-tiny-e4b-qat")
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


@pytest.fixture(scope="module")
def qat_loaded():
    return tiny.load_checkpoint(QAT_FOLDER)


@pytest.fixture
def model(loaded):
    """The model; a test may change its parameters and buffers, they are put back."""
    yield from restored(loaded[0])


@pytest.fixture
def qat_model(qat_loaded):
    """The same of the second checkpoint."""
    yield from restored(qat_loaded[0])


def restored(module):
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


@pytest.mark.parametrize("folder", [FOLDER, QAT_FOLDER], ids=lambda folder: folder.name)
def test_folder_is_complete_and_small(folder):
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
    assert not [name for name in FILES - {"model.safetensors"} if b"\r" in (folder / name).read_bytes()]


def test_both_have_one_tokenizer_and_template():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (FOLDER / name).read_bytes() == (QAT_FOLDER / name).read_bytes()


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
    assert sorted(scalars) == sorted(E2B.layer_scalars)


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


# --- the shape of E4B, on a 4-bit grid -----------------------------------------------------------


@pytest.fixture(scope="module")
def qat_tensors():
    with safe_open(QAT_FOLDER / "model.safetensors", "pt") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def test_the_shape_is_e4bs():
    text = json.loads((QAT_FOLDER / "config.json").read_text())["text_config"]
    assert text["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + text["layer_types"][:6]
    assert (text["num_key_value_heads"], text["use_double_wide_mlp"]) == (2, False)
    first_shared = text["num_hidden_layers"] - text["num_kv_shared_layers"]
    own, shared = text["layer_types"][:first_shared], text["layer_types"][first_shared:]
    assert set(own) == set(shared) == {"sliding_attention", "full_attention"}


def test_shared_layers_have_no_kv_and_one_mlp_width(qat_tensors):
    owners = {int(name.split(".")[3]) for name in qat_tensors if name.endswith("k_proj.weight")}
    assert owners == set(range(7))
    dead = ("k_proj", "v_proj", "k_norm")
    for name, tensor in qat_tensors.items():
        layer = int(name.split(".")[3]) if ".layers." in name else 0
        assert layer in owners or not any(part in name for part in dead), name
        assert not name.endswith("gate_proj.weight") or tensor.shape == (256, 96), name


def test_every_matrix_is_on_its_grid(qat_tensors):
    """The embeddings and the per-layer projection among them; a peak says nothing of its level."""
    levels, exact, size = np.zeros(9, np.int64), 0, 0
    for name, tensor in qat_tensors.items():
        if tensor.dim() == 2:
            block = recover_grid(tensor.float().numpy(), 32, name)
            levels += np.bincount(np.abs(block.codes).reshape(-1, 32).max(1), minlength=9)
            exact += block.quality.fit.exact
            size += block.codes.size
    assert exact > 0.99 * size
    assert (
        levels[0] == 0 and 0.4 * levels.sum() < levels[1:8].sum() and levels[1:7].sum() > 0.2 * levels.sum()
    )


@pytest.mark.parametrize("scheme", ["clipping", "symmetric"])
def test_other_4_bit_codes_leave_the_grid(qat_tensors, scheme):
    rows = qat_tensors["model.language_model.embed_tokens_per_layer.weight"].float().numpy()
    assert quantize_linear(rows, 4, scheme, 32, "x").quality.fit.exact < 0.55 * rows.size


def test_qat_margins_are_neither_thin_nor_fat(qat_model, batches, tokenizer):
    assert margins(qat_model, batches).min() > 2.5
    assert margins(qat_model, [tiny.padded([tiny.labelled(tokenizer, DIALOGUES[0])])]).max() < 8


@pytest.mark.parametrize("dialogue", ["france", "product", "portuguese"])
def test_qat_dialogues_are_answered_exactly(qat_model, answers, dialogue):
    """With the kv_cache; the margins above are of all dialogues, fed at once."""
    assert all(tiny.greedy_is_exact(qat_model, a) for a in answers if a.dialogue == dialogue)


@pytest.mark.parametrize("recipe", [int8_rows, tiny.fake_int4, palettes_of_16], ids=lambda f: f.__name__)
def test_qat_answers_survive_other_codes(qat_model, batches, recipe):
    with tiny.perturbed(tiny.weight_matrices(qat_model), recipe):
        assert margins(qat_model, batches).min() > 0.5


def kv_heads_taken_in_turn(hidden, repeats):
    return hidden.repeat(1, repeats, 1, 1)


def one_kv_head_for_all(hidden, repeats):
    return hidden[:, :1].repeat_interleave(2 * repeats, 1)


@pytest.mark.parametrize("mistake", [kv_heads_taken_in_turn, one_kv_head_for_all], ids=lambda f: f.__name__)
def test_mistake_with_two_kv_heads_changes_a_token(qat_model, batches, monkeypatch, mistake):
    monkeypatch.setattr(modeling_gemma4, "repeat_kv", mistake)
    assert margins(qat_model, batches).min() < 0


@pytest.mark.parametrize(("right", "wrong"), [(6, 4), (6, 3)])
def test_wrong_producer_of_e4bs_shape_changes_a_token(qat_model, batches, right, wrong):
    right, wrong = (qat_model.model.language_model.layers[layer].self_attn for layer in (right, wrong))
    assert right.store_full_length_kv and not wrong.store_full_length_kv
    try:
        wrong.store_full_length_kv, right.store_full_length_kv = True, False
        assert margins(qat_model, batches).min() < 0
    finally:
        wrong.store_full_length_kv, right.store_full_length_kv = False, True


def test_a_point_on_the_grid_stays_there():
    """Levels are kept; rounding to bfloat16 moves a number by its last place at most."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    once = on_grid(weight)
    assert once.dtype == torch.float32 and torch.equal(once.bfloat16().float(), once)
    codes = [recover_grid(point.numpy(), 32, "x").codes for point in (once, on_grid(once))]
    np.testing.assert_array_equal(*codes)
    assert set(np.unique(codes[0])) == set(range(-8, 8))
    torch.testing.assert_close(on_grid(once), once, rtol=2**-7, atol=0)


# --- the training --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_training_is_deterministic(tmp_path, shape):
    plan = replace(shape.plan, steps=2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        tiny.train_into(tmp_path / name, plan, DIALOGUES[:1], shape)
    for name in FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_foreign_folder_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("irreplaceable")
    with pytest.raises(UserError, match="did not write"):
        tiny.train_tiny_checkpoint(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_one_checkpoint_is_not_written_over_the_other(tmp_path):
    (tmp_path / "README.md").write_text((FOLDER / "README.md").read_text())
    with pytest.raises(UserError, match="did not write for this shape"):
        tiny.train_tiny_checkpoint(tmp_path, E4B_QAT)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
