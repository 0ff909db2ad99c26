"""config.json in every accepted spelling gives one canonical configuration; nothing that is absent is guessed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.text_config import FULL, SLIDING, RopeSpec, TextConfig
from workflow_scripts.errors import UserError

CANONICAL = tiny.canonical_config()


def parse(raw):
    return parse_text_config(raw, "folder/config.json")


def refused(raw) -> str:
    with pytest.raises(UserError) as problem:
        parse(raw)
    message = str(problem.value)
    assert message.startswith("folder/config.json: ")
    return message


def edited(**changes):
    """A wrapper config with changes in its text part; None removes a key."""
    raw = tiny.raw_config()
    for name, value in changes.items():
        raw["text_config"].pop(name, None)
        if value is not None:
            raw["text_config"][name] = value
    return raw


@pytest.mark.parametrize("wrapper", [True, False])
@pytest.mark.parametrize("spelling", ["hub", "5.24"])
@pytest.mark.parametrize("rope", ["nested", "flat"])
def test_all_spellings_mean_the_same(wrapper, spelling, rope):
    raw = tiny.raw_config(wrapper=wrapper, spelling=spelling, rope=rope)
    assert parse(raw) == CANONICAL
    assert CANONICAL.rope == {
        FULL: RopeSpec(1e6, "proportional", 0.25),
        SLIDING: RopeSpec(1e4, "default", 1.0),
    }
    assert CANONICAL.eos_token_ids == (1, 106)


def test_what_transformers_saves_is_accepted(tmp_path):
    transformers = pytest.importorskip("transformers")
    text = {name: value for name, value in tiny.text_config().items() if name != "model_type"}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=None, audio_config=None, eos_token_id=[1, 106]
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "global_head_dim" not in saved["text_config"]  # so this is the other spelling
    assert parse(saved) == CANONICAL


def test_json_round_trip():
    assert TextConfig.from_json(json.loads(json.dumps(CANONICAL.to_json()))) == CANONICAL


@pytest.mark.parametrize("change", [{"surplus": 1}, {"head_dim": None}])
def test_a_stored_config_of_another_format_is_refused(change):
    stored = {name: value for name, value in (CANONICAL.to_json() | change).items() if value is not None}
    with pytest.raises(UserError, match=r"surplus|head_dim"):
        TextConfig.from_json(stored)


def test_topology_of_e2b():
    """Figures of the published model: producers 13 and 14, 12 sliding and 3 full slots, double-wide shared MLPs."""
    e2b = parse(
        edited(
            **{
                "num_hidden_layers": 35,
                "num_kv_shared_layers": 20,
                "layer_types": [*[SLIDING] * 4, FULL] * 7,
            },
            intermediate_size=6144,
        )
    )
    assert e2b.first_shared_layer == 15
    assert [e2b.producer(layer) for layer in (3, 4, 15, 19, 33, 34)] == [3, 4, 13, 14, 13, 14]
    assert len(e2b.slots(SLIDING)) == 12 and e2b.slots(FULL) == [4, 9, 14]
    assert (e2b.layer_intermediate_size(14), e2b.layer_intermediate_size(15)) == (6144, 12288)
    assert (e2b.layer_head_dim(13), e2b.layer_head_dim(14)) == (32, 64)
    assert not replace(e2b, num_kv_shared_layers=0).is_shared(34)


ABSENT = [
    "vocab_size",
    "vocab_size_per_layer_input",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "global_head_dim",
    "hidden_size_per_layer_input",
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "sliding_window",
    "final_logit_softcapping",
    "rms_norm_eps",
    "max_position_embeddings",
    "layer_types",
    "hidden_activation",
    "bos_token_id",
    "pad_token_id",
]


@pytest.mark.parametrize("name", ABSENT)
@pytest.mark.parametrize("null", [True, False])
def test_an_absent_or_null_field_is_refused_by_name(name, null):
    raw = tiny.raw_config()
    del raw["text_config"][name]
    if null:
        raw["text_config"][name] = None
    message = refused(raw)
    assert f"text_config.{name} is missing" in message and "must not be guessed" in message


def test_all_absent_fields_are_named_at_once():
    assert "hidden_activation" in (message := refused(edited(hidden_activation=None, sliding_window=None)))
    assert "sliding_window" in message


@pytest.mark.parametrize("spelling", ["nested", "flat"])
def test_no_rope_key_has_a_default(spelling):
    """Every key that RoPE is read from, removed one by one: none may fall back to a theta of 10000 or a type."""
    raw = tiny.raw_config(rope=spelling)
    text = raw["text_config"]
    homes = (
        [text] if spelling == "flat" else [text["rope_parameters"][FULL], text["rope_parameters"][SLIDING]]
    )
    tried = 0
    for home in homes:
        for name in (
            "rope_theta",
            "rope_type",
            "partial_rotary_factor",
            "rope_local_base_freq",
            "global_partial_rotary_factor",
        ):
            if name in home:
                value = home.pop(name)
                assert "rope_parameters." in refused(raw)
                home[name] = value
                tried += 1
    assert tried == (3 if spelling == "flat" else 5)
    assert parse(raw) == CANONICAL


def test_no_rope_keys_at_all():
    message = refused(edited(rope_parameters=None))
    assert "rope_parameters.full_attention" in message and "must not be guessed" in message


def test_one_theta_for_two_layer_types_is_ambiguous():
    raw = edited(rope_parameters=None, rope_theta=1e6, global_partial_rotary_factor=0.25)
    assert "rope_parameters.sliding_attention" in refused(raw) and "rope_local_base_freq" in refused(raw)


def test_spellings_that_disagree_are_refused():
    assert "rope_local_base_freq = 50000.0" in refused(edited(rope_local_base_freq=50000.0))
    table = {"4": {"head_dim": 128}, "9": {"head_dim": 128}}
    message = refused(edited(per_layer_config=table))
    assert "global_head_dim = 64" in message and "per_layer_config = 128" in message


@pytest.mark.parametrize(
    "table",
    [
        {"4": {"head_dim": 64}},  # layer 9 left out
        {"4": {"head_dim": 64}, "9": {"head_dim": 32}},
        {"3": {"head_dim": 64}, "4": {"head_dim": 64}, "9": {"head_dim": 64}},
        {"4": {"head_dim": 64, "num_key_value_heads": 2}, "9": {"head_dim": 64}},
        {"4": {"head_dim": 64}, "9": {"head_dim": 64}, "10": {"head_dim": 64}},
    ],
)
def test_an_irregular_per_layer_config_is_refused(table):
    assert "per_layer_config" in refused(edited(global_head_dim=None, per_layer_config=table))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_k_eq_v", True),
        ("enable_moe_block", True),
        ("attention_bias", True),
        ("use_bidirectional_attention", "vision"),
        ("attn_logit_softcapping", 50.0),
        ("hidden_activation", "silu"),
        ("rope_scaling", {"factor": 8.0, "rope_type": "linear"}),
        ("tie_word_embeddings", False),
        ("quantization_config", {"quant_method": "awq"}),
    ],
)
def test_features_of_other_models_are_refused(name, value):
    assert name in refused(edited(**{name: value}))


def test_rope_scaling_inside_rope_parameters_is_refused():
    raw = tiny.raw_config()
    raw["text_config"]["rope_parameters"][FULL]["factor"] = 8.0
    assert "rope_parameters.full_attention.factor" in refused(raw)
    raw = tiny.raw_config()
    raw["text_config"]["rope_parameters"][FULL]["rope_type"] = "yarn"
    assert "yarn" in refused(raw)
    raw = tiny.raw_config()
    raw["text_config"]["rope_parameters"][SLIDING]["partial_rotary_factor"] = 0.5
    assert "rope_parameters.sliding_attention.partial_rotary_factor" in refused(raw)


def test_untied_at_the_top_is_refused_too():
    assert "tie_word_embeddings" in refused(tiny.raw_config() | {"tie_word_embeddings": False})
    raw = edited(tie_word_embeddings=None)
    del raw["tie_word_embeddings"]
    assert "tie_word_embeddings is missing" in refused(raw)


@pytest.mark.parametrize("model_type", ["gemma3n", "llama", None])
def test_other_models_are_told_what_is_supported(model_type):
    message = refused({**tiny.raw_config(), "model_type": model_type})
    assert f"`{model_type}`" in message and "gemma4" in message and "gemma4_text" in message


def test_a_wrapper_without_text_config_is_refused():
    assert "text_config is missing" in refused({"model_type": "gemma4"})


def test_vocab_size_that_the_runtime_aborts_on():
    message = refused(edited(vocab_size=1000, vocab_size_per_layer_input=1000))
    assert (
        "vocab_size is 1000, not a multiple of 64" in message
        and "pipelined engine" in message
        and "1024" in message
    )


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "head_dim", "global_head_dim", "hidden_size_per_layer_input"]
)
def test_sizes_that_cannot_be_grouped(name):
    assert f"{name} is 80, not a multiple of 32" in refused(edited(**{name: 80}))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layer_types": [SLIDING] * 10}, "layer_types"),
        ({"layer_types": [*[SLIDING] * 4, FULL]}, "layer_types has 5 entries, but num_hidden_layers is 10"),
        ({"layer_types": ["chunked_attention"] * 10}, "chunked_attention"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers 10"),
        ({"num_kv_shared_layers": 6}, "no full_attention layer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input 64"),
        ({"bos_token_id": 128}, "128 is outside vocab_size 128"),
    ],
)
def test_contradictions_are_refused(changes, word):
    assert word in refused(edited(**changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "96"),
        ("hidden_size", 96.0),
        ("head_dim", 0),
        ("sliding_window", True),
        ("use_double_wide_mlp", 1),
        ("rms_norm_eps", 0),
        ("final_logit_softcapping", float("nan")),
        ("global_head_dim", "64"),
        ("bos_token_id", -1),
        ("rope_parameters", 10000.0),
        ("rope_parameters", {FULL: 1, SLIDING: 2}),
        ("per_layer_config", [64]),
        ("per_layer_config", {"4": 64}),
    ],
)
def test_values_of_the_wrong_kind_are_refused(name, value):
    assert name in refused(edited(**{name: value}))


@given(
    pattern=st.lists(st.sampled_from([SLIDING, FULL]), min_size=1, max_size=12).map(
        lambda kinds: [*kinds, FULL]
    ),
    shared=st.integers(0, 12),
)
def test_every_accepted_topology_has_a_producer_of_the_same_type(pattern, shared):
    raw = edited(layer_types=pattern, num_hidden_layers=len(pattern), num_kv_shared_layers=shared)
    try:
        config = parse(raw)
    except UserError:
        producers = set(pattern[: max(0, len(pattern) - shared)])
        assert producers != set(pattern)  # only a type that nobody produces may be refused
        return
    for layer, kind in enumerate(pattern):
        producer = config.producer(layer)
        assert producer < config.first_shared_layer and config.layer_types[producer] == kind
        assert producer in config.slots(kind)
        assert (producer == layer) == (not config.is_shared(layer))
