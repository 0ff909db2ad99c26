"""Language bundles with real decoders: packaged, driven from the folder alone, and answered by `chat`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from release_inputs import TINY
from state_models import CACHE_MINIMUM, CONTEXT, model

from tests import tiny
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.coreai.runtime import Bundle
from workflow_scripts.errors import UserError
from workflow_scripts.manifest import manifest_path
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.release import chat, driver
from workflow_scripts.release.plan import Plan
from workflow_scripts.release.tokenizer import ChatTokenizer
from workflow_scripts.tables.open import open_tables

FORMS = ("decode", "decode_tbl", "decode_ring")
# A layer of each type: export time is paid per layer.
SMALLEST = tiny.Dims(layer_types=(SLIDING, FULL), num_kv_shared_layers=0)
CAPACITIES = [24, CONTEXT - 1]
ANSWERS = 12  # ids


def name_of(form):
    return f"gpu-pipelined/driver_{form}"


@pytest.fixture(scope="module")
def results(run_stage, tmp_path_factory):
    """Name -> result of the small model."""
    published = tiny.write_checkpoint(tmp_path_factory.mktemp("small") / "published", SMALLEST)
    shutil.copy(TINY / "chat_template.jinja", published)
    layers = len(SMALLEST.layer_types)
    source = run_stage(
        "checkpoint",
        "driver",
        {"source": published},
        source="local",
        allow_moving_revision=False,
        sha256={},
        num_hidden_layers=layers,
    )
    inputs = {"checkpoint": manifest_path(source)}
    weights = run_stage("weights", "driver", inputs, recipe="fp32")
    return {"checkpoint": source, "weights": weights, "tables": run_stage("tables", "driver_raw", inputs)}


@pytest.fixture(scope="module")
def front(run_stage, results):
    """The folder of the tables."""
    return run_stage(
        "package",
        "driver-tables",
        {"checkpoint": manifest_path(results["checkpoint"]), "tables_0": manifest_path(results["tables"])},
        folder="driver-tables",
        driver=None,
        bundles={},
        tables=["raw"],
        tables_in=None,
        tokenizer=False,
        context=CONTEXT - 1,
        chunks=None,
        language=None,
    )


@pytest.fixture(scope="module")
def folders(run_stage, results, front):
    """Form -> its language bundle, beside the folder of its tables; all have room for as many positions."""

    def build(form):
        ring = form == "decode_ring"
        lengths = {"capacities": CAPACITIES} if ring else {"cache_minimum": CACHE_MINIMUM}
        made_of = {name: manifest_path(results[name]) for name in ("weights", "tables")}
        context = CAPACITIES[-1] if ring else CONTEXT
        bundle = f"driver_{form}.aimodel"
        decoder = run_stage(f"export_{form}", bundle, made_of, compute="fp32", context=context, **lengths)
        return run_stage(
            "package",
            name_of(form),
            {
                "checkpoint": manifest_path(results["checkpoint"]),
                "bundle_decoder": manifest_path(decoder),
                "beside_0": manifest_path(results["tables"]),
            },
            folder=name_of(form),
            driver="decode",
            bundles={"decoder": bundle},
            tables=[],
            tables_in={"folder": "driver-tables", "tables": ["raw"]},
            tokenizer=True,
            context=CONTEXT - 1,
            chunks=None,
            language={
                "compression": None,
                "functions": [f"decode_{capacity}" for capacity in CAPACITIES] if ring else ["main"],
                "max_context_length": CONTEXT - 1,
                "cache_minimum": None if ring else CACHE_MINIMUM,
            },
        )

    return {form: build(form) for form in FORMS}


@pytest.fixture(scope="module")
def reference(results):
    """What the decoder that equals Hugging Face's makes of random ids."""
    return model(Weights.open(results["weights"]), open_tables(results["tables"]))


@pytest.fixture()
def copies(front, folders, tmp_path):
    """Copies to damage: a function from form to its folder; the tables lie where the plan leads."""
    shutil.copytree(front, tmp_path / "driver-tables")
    return lambda form: Path(shutil.copytree(folders[form], tmp_path / name_of(form)))


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.unlink()  # it may be a hard link
    path.write_text(json.dumps(document))


def opened(folder):
    with driver.open_set(folder):
        pass


@pytest.mark.parametrize("form", FORMS)
def test_a_set_puts_after_each_id_what_the_reference_does(form, folders, reference):
    """Over a change of the caches' size; and a second conversation knows nothing of the first."""
    ids, chosen = reference.ids.tolist(), reference.logits.argmax(-1)
    found = driver.follow(str(folders[form]), {"long": ids, "again": ids[:5], "other": ids[7:9]})
    np.testing.assert_array_equal(found["long"], chosen)
    np.testing.assert_array_equal(found["again"], chosen[:5])
    assert len(found["other"]) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_has_as_many_positions_as_the_plan_says(form, folders):
    positions = Plan.open(folders[form]).context
    with driver.open_set(folders[form]) as bundles:
        for _ in range(positions):
            bundles.feed(5)
        with pytest.raises(UserError, match=f"longer than the {positions} positions"):
            bundles.feed(5)
        bundles.begin()
        bundles.feed(5)


def test_a_new_conversation_leaves_the_table_where_it_is(folders, monkeypatch):
    """It is gigabytes in a real model."""
    placed, place = [], Bundle.place
    with driver.open_set(folders["decode_tbl"]) as bundles:
        monkeypatch.setattr(Bundle, "place", lambda *given: placed.append(given[1].shape) or place(*given))
        bundles.begin()
        bundles.feed(5)
    cache = (2, 1, 1, CACHE_MINIMUM, SMALLEST.global_head_dim)
    assert placed == [cache, cache, (1, 1), (1, 1)]


def test_chat_answers_from_the_folder_alone(folders):
    """The three forms are one decoder: they say the same."""
    replies = {chat.reply(folder, "t5 t9", ANSWERS) for folder in folders.values()}
    plan = Plan.open(folders["decode"])
    tokenizer = ChatTokenizer.open(folders["decode"] / plan.tokenizer)
    ids = tokenizer.encode_chat([{"role": "user", "content": "t5 t9"}])
    with driver.open_set(folders["decode"]) as bundles:
        output = driver.Conversation(bundles, plan.stop_token_ids).answer(ids, ANSWERS)
    text = tokenizer.decode([token for token in output if token not in plan.stop_token_ids])
    assert text and replies == {text}


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_goes_on_where_the_last_one_ended(form, folders, monkeypatch):
    """The same answer as to the whole conversation at once, and only what is new is fed."""
    with driver.open_set(folders[form]) as bundles:
        fed, feed = [], bundles.feed
        monkeypatch.setattr(bundles, "feed", lambda token: fed.append(token) or feed(token))
        two_turns = driver.Conversation(bundles, stop_ids=[])
        first = two_turns.answer([5, 9], 3)
        prompt = [5, 9, *first, 7, 8]
        second = two_turns.answer(prompt, 3)
        assert fed == [*prompt, *second[:-1]]
        assert driver.Conversation(bundles, stop_ids=[]).answer(prompt, 3) == second
        assert two_turns.answer([9, 5], 3) == driver.Conversation(bundles, stop_ids=[]).answer([9, 5], 3)


@pytest.mark.parametrize("form", FORMS)
def test_what_ids_are_chosen_from_is_told(form, folders, reference):
    ids = reference.ids.tolist()
    seen = driver.watch(str(folders[form]), {"long": ids})
    assert seen.keys() == {"long.ids", "long.logits"}
    np.testing.assert_array_equal(seen["long.logits"].argmax(-1), seen["long.ids"])
    assert np.abs(seen["long.logits"] - reference.logits).max() < 0.5


@pytest.mark.parametrize("form", FORMS)
def test_tables_of_another_checkpoint_are_refused(form, copies):
    folder = copies(form)
    edit(
        folder.parents[1] / "driver-tables" / "raw" / "meta.json",
        lambda meta: meta.update(checkpoint="cd" * 32),
    )
    with pytest.raises(
        UserError, match=rf"driver_{form}\.aimodel is of checkpoint .*its tables are of cdcdcd"
    ):
        opened(folder)


@pytest.mark.parametrize(
    ("form", "name", "change", "message"),
    [
        (
            "decode_ring",
            "gemma4_plan.json",
            lambda plan: plan.update(context=70),
            rf"metadata\.json has max_context_length {CONTEXT - 1}, its plan says 70",
        ),
        (
            "decode",
            "metadata.json",
            lambda metadata: metadata["language"].update(stop_token_ids=[1]),
            r"metadata\.json has stop_token_ids \[1\], its plan says \[1, \d+\]",
        ),
        (
            "decode_tbl",
            "tokenizer/tokenizer_config.json",
            lambda config: config.update(eos_token="<eos>"),
            r"tokenizer_config\.json has the eos_token <eos>, but a turn ends with <turn\|>",
        ),
        (
            "decode_tbl",
            "gemma4_plan.json",
            lambda plan: plan.update(cache_minimum=None),
            "its plan has no cache_minimum",
        ),
        (
            "decode",
            "gemma4_plan.json",
            lambda plan: plan["text"].update(vocab_size=127),
            "its plan says 127 token ids and 4 kv_cache slots, its decoder has 128 token ids and 4 kv_cache slots",
        ),
        (
            "decode_ring",
            "gemma4_plan.json",
            lambda plan: plan["text"]["slots"].update(full_attention=[]),
            "its plan says 128 token ids and 2 kv_cache slots, its decoder has 128",
        ),
        (
            "decode_tbl",
            "metadata.json",
            lambda metadata: metadata["language"]["function_map"].update(main=["main", "prefill"]),
            r"metadata\.json names the functions main, prefill, its decoder has main",
        ),
        (
            "decode",
            "metadata.json",
            lambda metadata: metadata.pop("language"),
            "does not say which functions the decoder has",
        ),
        ("decode", "gemma4_plan.json", lambda plan: plan.update(tables=[]), "neither a front end nor tables"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_refused(form, name, change, message, copies):
    folder = copies(form)
    edit(folder / name, change)
    with pytest.raises(UserError, match=message):
        opened(folder)
