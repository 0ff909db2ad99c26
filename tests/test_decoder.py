"""The re-authored decoder against Hugging Face transformers (eager, float32), and its sensitivity to every feature."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.conftest import TINY
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.make_oracle import greedy, load_model
from workflow_scripts.model.attention import KeyValue
from workflow_scripts.model.decoder import MASKED, Decoder, causal_masks
from workflow_scripts.model.frequencies import inverse_frequencies
from workflow_scripts.model.front_end_reference import exact_front_end
from workflow_scripts.model.heads import LogitsHead
from workflow_scripts.model.linear import eager_linears
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.model.norm import RMSNorm
from workflow_scripts.quantize.weights import Weights

CHATS = [
    [("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris.")],
    [("user", "Que veut dire « garçon » ? 🙂"), ("assistant", "1, 2, 3 – déjà vu 🙂")],
]


@pytest.fixture(scope="module")
def hf_model():
    torch.set_num_threads(1)
    model = AutoModelForImageTextToText.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def token_ids():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = [
        tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in chat], tokenize=False)
        for chat in CHATS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint):
    return Checkpoint.open(tiny_checkpoint)


@pytest.fixture(scope="module")
def weights(tiny_weights):
    return Weights.open(tiny_weights["fp32"])


def build(weights):
    linear = eager_linears(weights)
    head = LogitsHead(linear(HEAD_WEIGHT), weights.config.final_logit_softcapping, torch.float32)
    return Decoder(weights, linear, torch.float32).eval(), head


@torch.no_grad()
def whole_sequence(checkpoint, decoder, head, ids):
    embeds, per_layer = exact_front_end(checkpoint, np.array(ids))
    masks = causal_masks(decoder.config, len(ids), torch.float32)
    return head(decoder(embeds, per_layer, torch.arange(len(ids))[None], masks, {}).hidden)[0]


@torch.no_grad()
def one_at_a_time(checkpoint, decoder, head, ids):
    embeds, per_layer = exact_front_end(checkpoint, np.array(ids))
    window, past, rows = decoder.config.sliding_window, {}, []
    for position in range(len(ids)):
        here = slice(position, position + 1)
        full = torch.zeros(1, 1, 1, position + 1)
        sliding = full.clone()
        sliding[..., : max(0, position - window + 1)] = MASKED
        masks = {"full_attention": full, "sliding_attention": sliding}
        out = decoder(embeds[:, here], per_layer[:, here], torch.tensor([[position]]), masks, past)
        for layer, (key, value) in out.current.items():
            old = past.get(layer)
            past[layer] = KeyValue(
                key if old is None else torch.cat([old.key, key], 2),
                value if old is None else torch.cat([old.value, value], 2),
            )
        rows.append(head(out.hidden)[0, 0])
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("run", [whole_sequence, one_at_a_time])
def test_every_logit_equals_transformers(run, hf_model, checkpoint, weights, token_ids):
    decoder, head = build(weights)
    for ids in token_ids:
        expected = hf_model(input_ids=torch.tensor([ids])).logits[0]
        found = run(checkpoint, decoder, head, ids)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() <= FP32_LOGITS


@torch.no_grad()
def test_oracle_model_is_the_published_loading_path(hf_model, checkpoint, token_ids):
    """The oracle maps the per-layer table; nothing else may differ from `from_pretrained`."""
    ids = torch.tensor([token_ids[1]])
    assert torch.equal(load_model(checkpoint)(input_ids=ids).logits, hf_model(input_ids=ids).logits)


def test_oracle_answers_as_generate_does(hf_model, checkpoint, token_ids):
    prompt = token_ids[0][:16]
    with torch.no_grad():
        expected = hf_model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
            0, len(prompt) :
        ]
    run = greedy(load_model(checkpoint), prompt, 24, set(checkpoint.config.eos_token_ids))
    assert run.output_ids == expected.tolist()
    assert len(run.logits) == len(prompt) + len(run.output_ids) - 1


def one_plus_weight(monkeypatch, weights):
    monkeypatch.setattr(
        RMSNorm, "forward", lambda self, x: _stock_norm(self, x) + _stock_norm(self, x) / self.weight
    )
    return weights


_stock_norm = RMSNorm.forward


def scaled_attention(monkeypatch, weights):
    stock = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, scale, **kwargs: stock(*args, scale=None, **kwargs),
    )
    return weights


def changed(**fields):
    def change(monkeypatch, weights):
        return replace(weights, config=replace(weights.config, **fields))

    return change


def wrong_producer(monkeypatch, weights):
    stock = type(weights.config).producer
    monkeypatch.setattr(
        type(weights.config),
        "producer",
        lambda self, layer: 2 if stock(self, layer) == 3 != layer else stock(self, layer),
    )
    return weights


def unit_layer_scalars(monkeypatch, weights):
    stock = type(weights).vector
    monkeypatch.setattr(
        type(weights),
        "vector",
        lambda self, name: np.ones(1, np.float32) if name.endswith("layer_scalar") else stock(self, name),
    )
    return weights


def contiguous_rotation(monkeypatch, weights):
    """Rotating with the rotary size as the exponent's denominator, in place of the head size."""

    def frequencies(rope, head_dim):
        good = inverse_frequencies(rope, head_dim)
        return good if rope.rope_type == "default" else good ** (1 / rope.partial_rotary_factor)

    monkeypatch.setattr("workflow_scripts.model.rope.inverse_frequencies", frequencies)
    return weights


@pytest.mark.parametrize(
    "damage",
    [
        one_plus_weight,
        scaled_attention,
        changed(sliding_window=9),
        changed(sliding_window=7),
        changed(rms_norm_eps=1e-2),
        changed(final_logit_softcapping=50.0),
        wrong_producer,
        unit_layer_scalars,
        contiguous_rotation,
    ],
)
@torch.no_grad()
def test_every_feature_shows_in_the_logits(damage, monkeypatch, hf_model, checkpoint, weights, token_ids):
    """The parity bound is tight enough to catch each single wrong term."""
    decoder, head = build(damage(monkeypatch, weights))
    expected = hf_model(input_ids=torch.tensor([token_ids[0]])).logits[0]
    found = whole_sequence(checkpoint, decoder, head, token_ids[0])
    assert (found - expected).abs().max() > 10 * FP32_LOGITS


def test_proportional_rotation_leaves_the_upper_pairs_alone(checkpoint):
    frequencies = inverse_frequencies(checkpoint.config.rope["full_attention"], 512)
    assert frequencies.shape == (256,)
    assert not frequencies[64:].any()
    expected = 1e6 ** -(np.arange(0, 128, 2) / 512)
    np.testing.assert_allclose(frequencies[:64], expected, rtol=1e-6)


def test_stored_frequencies_do_not_depend_on_the_processor(checkpoint):
    """torch's own pow gives other last bits with and without AVX at the real model's head sizes."""
    script = (
        "from workflow_scripts.model.frequencies import inverse_frequencies as f\n"
        "from workflow_scripts.checkpoint.text_config import RopeSpec\n"
        "import hashlib\n"
        "tables = f(RopeSpec(1e4, 'default', 1.0), 256), f(RopeSpec(1e6, 'proportional', 0.25), 512)\n"
        "print(hashlib.sha256(b''.join(t.tobytes() for t in tables)).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for capability in ("default", "avx2")
    }
    assert len(found) == 1
    exact = 1e4 ** (-np.arange(0, 256, 2).astype(np.longdouble) / 256)
    sliding = inverse_frequencies(checkpoint.config.rope["sliding_attention"], 256)
    np.testing.assert_array_equal(sliding, exact.astype(np.float32))
