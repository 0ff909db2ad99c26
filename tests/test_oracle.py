"""The oracle refuses what a kv_cache cannot hold before any model runs, and compares texts exactly."""

import pytest

from workflow_scripts.errors import UserError
from workflow_scripts.gates import make_oracle
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.manifest import manifest_path

FRANCE = "What is the capital of France?"


@pytest.fixture
def ask(run_stage, tiny_checkpoint):
    """Run the stage for one dialogue; returns what the oracle knows of it."""

    def run(context=None, **dialogue):
        params = {"min_margin": 0, "dialogues": [{"name": "one", **dialogue}], "context": context}
        inputs = {"checkpoint": manifest_path(tiny_checkpoint)}
        return Oracle.open(run_stage("oracle", "dialogues", inputs, **params)).dialogues["one"]

    return run


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test if the model is so much as loaded."""

    def load(_):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(make_oracle, "load_model", load)


def refused(ask, *words, **dialogue):
    with pytest.raises(UserError) as caught:
        ask(**dialogue)
    for word in ("oracle dialogue `one`", "raise context", *words):
        assert word in str(caught.value)


def test_a_dialogue_may_fill_the_context_and_no_more(ask):
    """The last id of an answer is not fed."""
    prompt = [2, 105, 300, 301]
    assert len(ask(context=6, prompt_ids=prompt, new_tokens=3).fed_ids) == 6
    refused(ask, "4 tokens", "7 positions", "context is 6", context=6, prompt_ids=prompt, new_tokens=4)
    assert len(ask(prompt_ids=prompt, new_tokens=4).fed_ids) == 7  # without a context nothing is too long


def test_the_length_of_a_text_is_known_before_the_model_is_loaded(ask, no_model):
    refused(ask, "context is 20", context=20, turns=[FRANCE], new_tokens=20)
    refused(ask, "context is 6", context=6, prompt_ids=[2, 105, 300], new_tokens=5)


def test_later_turns_count_before_the_model_is_loaded(ask, no_model):
    """Without the earlier answers, which only the model can give, the last prompt is long enough to know."""
    refused(ask, "context is 60", context=60, turns=[FRANCE] * 5, new_tokens=8)


def test_earlier_answers_count_as_soon_as_they_are_there(ask):
    turns = ["My name is Inês.", FRANCE]
    fed = len(ask(turns=turns, new_tokens=4).prompt_ids) + 4 - 1
    refused(ask, f"{fed} positions", context=fed - 1, turns=turns, new_tokens=4)


@pytest.mark.parametrize(
    "expected", ["The capital of France is Paris. ", " The capital of France is Paris.", "Paris"]
)
def test_expected_text_is_compared_exactly(ask, expected):
    with pytest.raises(
        UserError, match=r"the checkpoint answers 'The capital of France is Paris\.', expected"
    ):
        ask(turns=[FRANCE], new_tokens=8, expect_text=expected)
