"""The shipped configurations load; every mistake a user can make is named with its key and its cure."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from workflow_scripts.checkpoint.tiny_dialogues import DIALOGUES
from workflow_scripts.config import GATES, load_config, overlay, read_config
from workflow_scripts.configuration import meaning
from workflow_scripts.configuration.chunks import engine_problems
from workflow_scripts.configuration.data import DRIVERS, ENGINE_CONTEXT, ENGINE_RECIPES, FORMS, KERNEL_BITS
from workflow_scripts.configuration.shape import SCHEMA
from workflow_scripts.errors import UserError
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.recipes import RECIPES, LinearEncoding, PaletteEncoding

ROOT = Path(__file__).parents[1]
MODEL_FILES = sorted(path.name for path in (ROOT / "config").glob("gemma-*.yaml"))
DEFAULT = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
TINY = ROOT / "resources/gemma-4-tiny"


def changed(text):
    return overlay(DEFAULT, yaml.safe_load(text))


def problems(text):
    with pytest.raises(UserError) as caught:
        load_config(changed(text))
    return str(caught.value)


def test_overlay_is_snakemakes():
    from snakemake.utils import update_config

    before = copy.deepcopy(DEFAULT)
    for over in (
        {"checkpoint": {"sha256": {"a": "b"}}, "oracle": {"dialogues": [1]}, "folders": {"macos": None}},
        {"model": {"a": {"b": 1}}, "new": {"c": {}}, "store": "off"},
    ):
        expected = copy.deepcopy(DEFAULT)
        update_config(expected, over)
        assert overlay(DEFAULT, over) == expected
    assert before == DEFAULT


def test_files_are_laid_over_the_default_in_their_order(tmp_path):
    for name, text in (("a.yaml", "{context: 400, slug: a}"), ("b.yaml", "slug: b")):
        (tmp_path / name).write_text(text)
    config = read_config([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert (config.model, config.context, config.slug) == ("gemma-4-tiny", 400, "b")
    assert read_config([]) == load_config(DEFAULT)


@pytest.mark.parametrize(
    ("text", "words"), [("a: b: c", "is not YAML"), ("- 1", "keys with values"), (None, "cannot be read")]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, text, words):
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"a\.yaml {words}|a\.yaml.*{words}") as caught:
        read_config([tmp_path / "a.yaml"])
    assert "\n" not in str(caught.value)


PIPELINED = tuple(f"gpu-pipelined/gemma4_tiny_decode_int4lin{form}" for form in ("", "_tbl", "_tbl_ring"))


def test_default_is_the_embedded_model():
    config = load_config(DEFAULT)
    assert config.model == "gemma-4-tiny"
    assert config.artifacts["core_int8"].published == "gemma4_tiny_hostcache_L10_int8.aimodel"
    assert config.artifacts["gather_raw"].published == "gemma4_gather_raw"
    assert "gather_raw" not in config.bundles()
    assert len(config.bundles()) == len(config.artifacts) - 1
    assert config.recipes() == ("fp16", "fp32", "int4-kmeans-g32", "int4-linear-b32", "int8-kmeans-g32")
    assert [name for name, folder in config.folders.items() if folder.can_chat] == [
        *("macos", "ios-gpu", "ios-ane"),
        *PIPELINED,
    ]
    assert [config.folders[name].decoder for name in PIPELINED] == [
        *("decode_int4", "decode_int4_tbl", "decode_int4_ring"),
    ]
    assert all(config.tables_of(config.folders[name]) == ("gather_raw",) for name in PIPELINED)
    assert config.folders["macos"].artifacts == ("frontend_int8", "core_metal_int8", "head_kernel_int8")
    assert config.folders["ios-gpu"].artifacts == ("core_metal_int4", "head_kernel_int4")
    assert config.folders["ios-gpu"].tables_in == "ios-frontend"
    engine = config.folders["ios-ane"]
    assert [config.artifacts[key].layers for key in engine.chunks] == [(0, 3), (3, 5), (5, 10)]
    assert {name: config.positions(folder) for name, folder in config.folders.items() if folder.can_chat} == {
        "macos": 320,
        "ios-gpu": 320,
        "ios-ane": 64,
        **dict(zip(PIPELINED, (319, 319, 320), strict=True)),
    }
    assert (ROOT / config.checkpoint.source / "model.safetensors").is_file()


# No public record tells the sha256 of their files; the file says so.
UNCONFIRMED = {"gemma-4-e4b-qat.yaml"}


@pytest.mark.parametrize("name", MODEL_FILES)
def test_model_files_load_over_the_default(name):
    config = load_config(changed((ROOT / "config" / name).read_text(encoding="utf-8")))
    assert config.model == Path(name).stem
    assert re.fullmatch("[0-9a-f]{40}", config.checkpoint.revision)
    assert "model.safetensors" in config.checkpoint.sha256 or name in UNCONFIRMED
    leaked = {dialogue["name"] for dialogue in DEFAULT["oracle"]["dialogues"]} - {
        "france",
        "digits",
        "two_turns",
        "long",
    }
    assert not leaked & config.oracle.dialogues.keys()
    assert max(d.new_tokens for d in config.oracle.dialogues.values()) >= 256
    assert "tables" in config.gates.required


@pytest.mark.parametrize("name", [*MODEL_FILES, "README.md"])
def test_a_model_states_all_that_depends_on_it(name):
    """What a model file leaves out is the embedded model's: its prompt, its answer, its sizes."""
    text = (ROOT / "config" / name).read_text(encoding="utf-8")
    if name == "README.md":
        text = re.findall(r"```yaml\n(model:.*?)```", text, flags=re.DOTALL)[0]
    stated = yaml.safe_load(text)
    assert stated.keys() >= {"model", "slug", "num_hidden_layers", "context", "checkpoint", "oracle", "gates"}
    assert stated["oracle"].keys() == DEFAULT["oracle"].keys()
    assert stated["gates"].keys() == DEFAULT["gates"].keys()


def test_e2b_keeps_the_published_names():
    config = load_config(changed((ROOT / "config/gemma-4-e2b.yaml").read_text(encoding="utf-8")))
    names = {artifact.published for artifact in config.artifacts.values()}
    assert names >= {
        "gemma4_e2b_hostcache_L35_int8.aimodel",
        "gemma4_e2b_int8_head.aimodel",
        "gemma4_e2b_head_argmax_int8.aimodel",
        *(f"gemma4_e2b_hostcache_chunk{number}_int8.aimodel" for number in range(1, 7)),
        "gemma4_e2b_frontend_int8.aimodel",
        "gemma4_e2b_metal_int8v3_L35.aimodel",
        "gemma4_e2b_head_argmax_kernel.aimodel",
        "gemma4_e2b_metal_int4km_L35.aimodel",
        "gemma4_e2b_head_argmax_int4km.aimodel",
        "gemma4_gather_raw",
    }
    chunks = [config.artifacts[key] for key in config.folders["ios-ane"].chunks]
    ranges = [(0, 8), (8, 15), (15, 20), (20, 25), (25, 30), (30, 35)]
    assert [chunk.layers for chunk in chunks] == ranges
    assert {chunk.context for chunk in chunks} == {64}
    published = config.oracle.dialogues["published"]
    assert len(published.prompt_ids) == 19
    assert len(published.expect_ids) == 8


def test_roles_of_decoders_have_any_names():
    folders = load_config(changed("folders: {gpu-pipelined: {bundles: {frontend: decode_int4}}}")).folders
    assert PIPELINED[0] in folders


def test_a_long_run_that_no_decoder_has_room_for_is_refused_before_the_build():
    raw = requiring("long_run", "{context: 512, folders: {ios-ane: null}}")
    raw["oracle"]["dialogues"] = [{"name": "a", "prompt_ids": ids(320), "new_tokens": 8}]
    with pytest.raises(
        UserError, match=r"has long_run, but .* more than the 319 positions of folders\.gpu-pipe"
    ):
        load_config(raw)
    raw["oracle"]["dialogues"][0]["prompt_ids"] = ids(319)
    load_config(raw)


def test_what_phones_cannot_run_is_refused_where_it_is_asked_for():
    growing = "artifacts: {{decode_int4_tbl: {{context: {}, cache_minimum: 1024, platforms: [{}], aot: []}}}}"
    for context, platform in ((2047, "ios"), (4096, "macos")):
        tbl = load_config(changed(growing.format(context, platform))).artifacts["decode_int4_tbl"]
        assert (tbl.context, tbl.positions, tbl.platforms) == (context, context - 1, (platform,))
    ring = load_config(changed("artifacts: {decode_int4_ring: {capacities: [1024, 4096]}}"))
    assert ring.artifacts["decode_int4_ring"].platforms == ("macos", "ios")
    assert ring.artifacts["stateful_fp32"].platforms == ("macos",)


def test_a_dialogues_params_are_what_the_file_says():
    config = load_config(DEFAULT)
    assert [d.params() for d in config.oracle.dialogues.values()] == DEFAULT["oracle"]["dialogues"]


def test_default_dialogues_are_those_of_the_embedded_model():
    """Texts agree with what it was trained on; an answer that must stop has room to, and one is long."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    trained = {tuple(turn.user for turn in dialogue.turns): dialogue.turns for dialogue in DIALOGUES}
    longest = 0
    for dialogue in load_config(DEFAULT).oracle.dialogues.values():
        answers = [turn.model for turn in trained[dialogue.turns]]
        if dialogue.expect_text is not None:
            assert dialogue.expect_text == answers[-1]
        lengths = [len(tokenizer.encode(a, add_special_tokens=False).ids) + 1 for a in answers]
        if dialogue.stops:
            assert max(lengths) <= dialogue.new_tokens, dialogue.name  # the stop token counts
        longest = max(longest, *lengths)
    assert longest > 256


def test_null_drops_an_inherited_entry():
    gates = "required: [structure, numbers, quantization, tokens, long_run, chat]"
    folders = "{ios-gpu: null, ios-ane: null, gpu-pipelined: null}"
    config = load_config(changed(f"{{folders: {folders}, artifacts: {{chunk1: null}}, gates: {{{gates}}}}}"))
    assert list(config.folders) == ["macos", "ios-frontend"]
    assert "chunk1" not in config.artifacts


def test_a_moving_revision_needs_consent():
    text = "checkpoint: {source: 'hf://google/gemma-4-E2B-it@main', allow_moving_revision: true}"
    checkpoint = load_config(changed(text)).checkpoint
    assert (checkpoint.repository, checkpoint.revision) == ("google/gemma-4-E2B-it", "main")


COMMIT = "3e22461f65e89153144f8adb70e3b8c2cc9845a7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # unknown keys, wrong types, wrong values: key, found, allowed, nearest
        ("contxt: 3", ["contxt: unknown key", "3", "allowed here: model, slug", "Did you mean context?"]),
        ("oracle: {min_margn: 1}", ["oracle.min_margn: unknown key", "Did you mean min_margin?"]),
        ("context: '512'", ["context: found '512'", "whole number"]),
        ("context: true", ["context: found True", "whole number"]),
        ("context: 0", ["context: found 0", "2 to 131072"]),
        ("model: null", ["model: found None", "text"]),
        ("model: '../x'", ["model: found '../x'", "starting with a letter or digit"]),
        ('model: "x\\n"', ["model: found 'x\\n'"]),
        ("slug: Gemma-4", ["slug: found 'Gemma-4'", "small letters"]),
        ("checkpoint: {sha256: {config.json: ABC}}", ["checkpoint.sha256.config.json: found 'ABC'", "64"]),
        ("checkpoint: {sha256: {../x: abc}}", ["checkpoint.sha256: the name '../x'"]),
        ("artifacts: {1: {form: head}}", ["artifacts: the key 1 is not text"]),
        ("oracle: {dialogues: []}", ["oracle.dialogues: is empty"]),
        ("oracle: {dialogues: [{turns: [hi], new_tokens: 1}]}", ["oracle.dialogues[0].name: missing"]),
        ("oracle: {min_margin: .nan}", ["oracle.min_margin: found nan"]),
        ("oracle: {min_margin: .inf}", ["oracle.min_margin: found inf"]),
        (
            "artifacts: {core_int8: {form: hostcach_core}}",
            [
                "artifacts.core_int8.form: found 'hostcach_core'",
                "head_argmax",
                "Did you mean hostcache_core?",
            ],
        ),
        (
            "artifacts: {core_int8: {recipe: int8}}",
            ["artifacts.core_int8.recipe: found 'int8'", "Did you mean int8-linear-b32?"],
        ),
        ("folders: {macos: {driver: hostcash}}", ["folders.macos.driver", "Did you mean hostcache?"]),
        ("folders: {../up: {tables: [gather_raw]}}", ["folders: the name '../up'"]),
        ("gates: {required: [numbrs]}", ["gates.required[0]: found 'numbrs'", "Did you mean numbers?"]),
        ("gates: {required: [tokens, tokens]}", ["gates.required", "each entry once"]),
        ("gates: {reported: [gpus]}", ["gates.reported[0]: found 'gpus'", "Did you mean gpu?"]),
        # where the weights come from
        ("checkpoint: {source: 'hf://a/b@main'}", ["checkpoint.source", "`main`", "allow_moving_revision"]),
        ("checkpoint: {source: 'hf://a/b@3e22461'}", ["checkpoint.source", "`3e22461`", "40 hex"]),
        ("checkpoint: {source: 'hf://a/b'}", ["checkpoint.source: found 'hf://a/b'", "owner/name@"]),
        (
            f"checkpoint: {{source: 'https://x/y@{COMMIT}'}}",
            ["checkpoint.source", "a local folder, or hf://"],
        ),
        # dialogues
        (
            "oracle: {dialogues: [{name: a, new_tokens: 1}]}",
            ["[0] (a): found no prompt", "turns, prompt_ids"],
        ),
        (
            "oracle: {dialogues: [{name: a, new_tokens: 1, turns: [x], prompt_ids: [1]}]}",
            ["found turns and prompt_ids", "exactly one"],
        ),
        (
            "{context: 10, oracle: {dialogues: [{name: a, new_tokens: 9, prompt_ids: [2, 3, 4]}]}}",
            ["3 prompt tokens", "new_tokens: 9", "context: 10"],
        ),
        ("context: 200", ["(long)", "new_tokens: 256", "context: 200"]),
        (
            "oracle: {dialogues: [{name: a, new_tokens: 1, turns: [x], expect_ids: [1, 2]}]}",
            ["expect_ids has 2 ids, more than new_tokens: 1"],
        ),
        (
            "oracle: {dialogues: [{name: a, new_tokens: 1, turns: [x]}, {name: A, new_tokens: 1, turns: [y]}]}",
            ["oracle.dialogues[1].name: 'A' is taken by oracle.dialogues[0].name"],
        ),
        # ahead of time, and where a release goes
        (
            "artifacts: {core_metal_int4: {aot: [{platform: macOS, architecture: h18p, preferred_compute: gpu}]}}",
            ["artifacts.core_metal_int4.aot[0]: architecture h18p belongs to iOS, not to macOS", "h16c"],
        ),
        (
            "artifacts: {decode_int4_ring: {aot: "
            "[{platform: iOS, architecture: h18p, preferred_compute: neural-engine}]}}",
            ["artifacts.decode_int4_ring.aot[0]: linear 4-bit weights do not compile for the Neural Engine"],
        ),
        (
            "artifacts: {core_metal_int4: {aot: [{platform: iOS, architecture: h18p, preferred_compute: gpu}, "
            "{platform: iOS, architecture: h18p, preferred_compute: none}]}}",
            ["artifacts.core_metal_int4.aot: has architecture h18p twice"],
        ),
        (
            "artifacts: {decode_int4_tbl: {platforms: [macos]}}",
            ["artifacts.decode_int4_tbl.aot[0]: found platform 'iOS'", "platforms are macos", "aot: []"],
        ),
        (
            "artifacts: {gather_raw: {aot: [{platform: iOS, architecture: h18p, preferred_compute: gpu}]}}",
            ["artifacts.gather_raw.aot: form raw_tables is no bundle"],
        ),
        (
            "artifacts: {core_metal_int4: {aot: [{platform: iOS, architecture: h18p}]}}",
            ["artifacts.core_metal_int4.aot[0].preferred_compute: missing", "`gpu`"],
        ),
        (
            "artifacts: {core_metal_int4: {aot: [{platform: iOS, architecture: h18p, preferred_compute: gpu, "
            "min_deployment_version: 27.0}]}}",
            ["aot[0].min_deployment_version: found 27.0", "in quotes"],
        ),
        (
            "artifacts: {gather_raw: {name: '{slug}_head_argmax_int4km_aotc_h18p'}}",
            ["'gemma4_tiny_head_argmax_int4km_aotc_h18p' is taken by artifacts.head_kernel_int4.aot[0]"],
        ),
        ("aot: {mode: on}", ["aot.mode: found True", "require, auto, off"]),
        ("repository: https://huggingface.co/me/x", ["repository: found", "OWNER/NAME"]),
        ("publish: true", ["publish: found True", "repository: OWNER/NAME"]),
        ("publish: 'yes'", ["publish: found 'yes'", "repository: OWNER/NAME"]),
        (
            "{publish: true, repository: a/b, checkpoint: {source: rehearsal}}",
            ["publish: found True, but the weights are random"],
        ),
        ("publish: 'maybe'", ["publish: found 'maybe'", "allowed: True, False, yes, no"]),
        # artifacts
        (
            "artifacts: {x: {form: head, recipe: fp16, name: x}}",
            ["artifacts.x.compute: missing", "form head"],
        ),
        ("artifacts: {x: {form: head, compute: fp16, name: x}}", ["artifacts.x.recipe: missing"]),
        ("artifacts: {gather_raw: {compute: fp16}}", ["artifacts.gather_raw.compute", "leave it out"]),
        ("artifacts: {core_fp32: {compute: fp16}}", ["artifacts.core_fp32.compute", "recipe fp32"]),
        (
            "artifacts: {core_metal_int8: {recipe: fp16}}",
            [
                "artifacts.core_metal_int8.recipe: found 'fp16'",
                "form hostcache_metal read palettes",
                "allowed: int8-kmeans-g32, int8-kmeans-g32-optimal, int4-kmeans-g32",
            ],
        ),
        (
            "artifacts: {x: {form: head_argmax_metal, compute: fp16, name: x}}",
            ["artifacts.x.recipe: missing"],
        ),
        (
            "artifacts: {core_int8: {name: '{slug}_hostcache_L{layers}_FP16'}}",
            ["artifacts.core_int8.name", "is taken by artifacts.core_fp16.name"],
        ),
        ("artifacts: {core_int8: {name: '{slugg}'}}", ["unknown placeholder {slugg}", "Did you mean slug?"]),
        ("artifacts: {core_int8: {name: '{}'}}", ["unknown placeholder {}", "allowed: slug, layers"]),
        ("artifacts: {core_int8: {name: '{layers:03d}'}}", ["{layers} takes no format"]),
        ("artifacts: {core_int8: {name: '{slug'}}", ["braces do not match"]),
        (
            "artifacts: {core_int8: {name: 'a/b'}}",
            ["artifacts.core_int8.name: found 'a/b'", "letters, digits"],
        ),
        ("artifacts: {core_int8: {name: '..'}}", ["artifacts.core_int8.name: found '..'"]),
        ("artifacts: {core_int8: {name: x.aimodel}}", ["leave .aimodel out"]),
        (
            "artifacts: {gather_raw: {name: tokenizer}}",
            ["artifacts.gather_raw.name", "'tokenizer' is reserved"],
        ),
        ("artifacts: {gather_raw: {name: Provenance.json}}", ["'Provenance.json' is reserved"]),
        ("artifacts: {gather_raw: {name: gemma4_plan.json}}", ["'gemma4_plan.json' is reserved"]),
        # folders
        (
            "folders: {macos: {bundles: {core: core_int9}}}",
            ["folders.macos.bundles.core: there is no artifact 'core_int9'", "Did you mean core_int8?"],
        ),
        (
            "folders: {macos: {bundles: {core: head_int8}}}",
            [
                "folders.macos.bundles.core: artifact head_int8 is of form head",
                "hostcache_core or hostcache_metal",
            ],
        ),
        (
            "folders: {macos: {bundles: {head: core_metal_int8}}}",
            [
                "folders.macos.bundles.head: artifact core_metal_int8 is of form hostcache_metal",
                "head_argmax_metal",
            ],
        ),
        # embeddings from another folder
        (
            "folders: {ios-gpu: {tables_in: ios_frontend}}",
            [
                "folders.ios-gpu.tables_in: found 'ios_frontend', but there is no such folder; allowed: ios-frontend",
                "Did you mean ios-frontend?",
            ],
        ),
        (
            "folders: {ios-gpu: {tables_in: macos}}",
            [
                "folders.ios-gpu.tables_in: found 'macos', but that folder has no tables; allowed: ios-frontend"
            ],
        ),
        (
            "folders: {ios-gpu: {tables_in: macos}, ios-frontend: null}",
            ["folders.ios-gpu.tables_in: found 'macos'", "no other folder has tables"],
        ),
        (
            "folders: {ios-gpu: {tables: [gather_raw], tables_in: ios-gpu}}",
            ["folders.ios-gpu.tables_in: found 'ios-gpu', the folder itself", "allowed: ios-frontend"],
        ),
        (
            "folders: {ios-frontend: null}",
            ["folders.ios-gpu.tables_in: found 'ios-frontend', but there is no such folder"],
        ),
        (
            "folders: {macos: {tables_in: ios-frontend}}",
            ["folders.macos.tables_in: found 'ios-frontend' beside bundles.frontend", "leave the other out"],
        ),
        (
            "folders: {ios-frontend: {tables_in: macos}}",
            ["folders.ios-frontend.tables_in: found 'macos', but the folder has no driver"],
        ),
        ("folders: {ios-gpu: {tables_in: null}}", ["folders.ios-gpu.tables_in: found None", "a text"]),
        ("folders: {new: {driver: hostcache}}", ["folders.new: has neither bundles nor tables"]),
        (
            "folders: {new: {driver: hostcache, bundles: {core: core_int8, head: head_int8}}}",
            ["folders.new.bundles.frontend: missing", "frontend, core, head", "tables_in"],
        ),
        (
            "folders: {macos: {bundles: {tail: head_int8}}}",
            ["folders.macos.bundles.tail", "no such role", "frontend, core, head"],
        ),
        ("folders: {new: {bundles: {core: core_int8}}}", ["folders.new.driver: missing"]),
        (
            "folders: {new: {tables: [core_int8]}}",
            ["folders.new.tables[0]", "form hostcache_core", "raw_tables"],
        ),
        ("folders: {MacOS: {tables: [gather_raw]}}", ["folders.MacOS: 'MacOS' is taken by folders.macos"]),
        ("folders: {new: {tokenizer: true}}", ["folders.new: has neither"]),
        ("folders: {macos: {tokenizer: false}}", ["folders.macos.tokenizer: missing or false", "driver"]),
        *(
            (
                f"folders: {{{name}: {{tables: [gather_raw]}}}}",
                [f"folders.{name}: the name '{name}' is reserved"],
            )
            for name in ("README.md", "sha256sums", "release.json", "measured.json")
        ),
        *(
            (
                f"folders: {{{name}: {{tables: [gather_raw]}}}}",
                [f"folders.{name}: the name '{name}' is reserved"],
            )
            for name in ("release", "gates", "bundles", "tiny_checkpoint")
        ),
        # a decoder in chunks
        ("artifacts: {chunk1: {layers: null}}", ["artifacts.chunk1.layers: found None, needs a list"]),
        (
            "artifacts: {x: {form: ane_chunk, recipe: fp16, compute: fp16, name: x}}",
            ["artifacts.x.layers: missing", "form ane_chunk needs the layers [first, last)"],
        ),
        *(
            (
                f"artifacts: {{chunk1: {{layers: {layers}}}}}",
                [f"artifacts.chunk1.layers: found {layers}; allowed: [first, last) within [0, 10)"],
            )
            for layers in ([0], [0, 1, 2], [3, 3], [3, 0], [0, 11])
        ),
        ("artifacts: {core_int8: {layers: [0, 10]}}", ["form hostcache_core has no layers, leave it out"]),
        ("artifacts: {head_int8: {context: 64}}", ["artifacts.head_int8.context: found 64", "leave it out"]),
        (
            "artifacts: {chunk1: {context: 2049}}",
            ["artifacts.chunk1.context: found 2049", "exact up to 2048 only"],
        ),
        (
            "{context: 4096, artifacts: {x: {form: ane_chunk, layers: [0, 3], recipe: fp16, compute: fp16, name: x}}}",
            ["artifacts.x.context: without it, 4096", "exact up to 2048 only"],
        ),
        (
            "artifacts: {chunk2: {layers: [4, 5]}}",
            [
                "folders.ios-ane.bundles.chunk2: has the layers [4, 5)",
                "the one before it ends before layer 3",
                "must start at 3",
            ],
        ),
        ("artifacts: {chunk2: {layers: [2, 5]}}", ["bundles.chunk2: has the layers [2, 5)", "start at 3"]),
        ("artifacts: {chunk1: {layers: [1, 3]}}", ["bundles.chunk1", "it is the first", "start at 0"]),
        (
            "artifacts: {chunk3: {layers: [5, 9]}}",
            ["the chunks end before layer 9, but num_hidden_layers is 10", "[9, 10) are in none"],
        ),
        (
            "folders: {ios-ane: {bundles: {chunk1: chunk2, chunk2: chunk1}}}",
            ["folders.ios-ane.bundles.chunk1: has the layers [3, 5)"],
        ),
        *(
            (f"artifacts: {{chunk2: {{{key}: {value}}}}}", [f"the chunks differ in {key} ({told}"])
            for key, value, told in (
                ("context", 128, "64 in chunk1, 128 in chunk2, 64 in chunk3"),
                ("recipe", "fp16", "int8-kmeans-g32 in chunk1, fp16 in chunk2"),
                ("compute", "fp32", "fp16 in chunk1, fp32 in chunk2"),
            )
        ),
        (
            "folders: {ios-ane: {bundles: {chunk5: chunk3}}}",
            ["folders.ios-ane.bundles.chunk5: driver chunks has no such role", "chunk4: missing"],
        ),
        (
            "folders: {new: {driver: chunks, bundles: {head: head_ane_int8}, tables_in: ios-frontend}}",
            ["folders.new.bundles.chunk1: missing; driver chunks needs the roles frontend, chunk1, head"],
        ),
        (
            "folders: {ios-ane: {bundles: {chunk1: core_int8, head: head_int8}}}",
            [
                "artifact core_int8 is of form hostcache_core; allowed: form ane_chunk",
                "allowed: form ane_head",
            ],
        ),
        # decoders and cores with states
        (
            "artifacts: {x: {form: decode, recipe: fp16, compute: fp16, name: x}}",
            ["x.tables: missing; form decode needs the raw tables", "x.cache_minimum: missing"],
        ),
        (
            "artifacts: {decode_int4: {tables: gather}}",
            [
                "decode_int4.tables: there is no artifact 'gather'; allowed: gather_raw. Did you mean gather_raw?"
            ],
        ),
        (
            "artifacts: {decode_int4: {tables: frontend_int8}}",
            [
                "decode_int4.tables: artifact frontend_int8 is of form frontend",
                "form raw_tables or raw_tables_int4",
            ],
        ),
        ("artifacts: {decode_int4: {cache_minimum: 320}}", ["cache_minimum: found 320, needs 4 to 319"]),
        ("artifacts: {decode_int4: {capacities: [8]}}", ["form decode has no capacities, leave it out"]),
        ("artifacts: {decode_int4_ring: {context: 8}}", ["form decode_ring has no context, leave it out"]),
        (
            "artifacts: {decode_int4_ring: {capacities: [320, 32]}}",
            ["capacities: found [320, 32]; they must ascend"],
        ),
        (
            "artifacts: {core_int8: {platforms: [ios]}}",
            ["form hostcache_core has no platforms, leave it out"],
        ),
        (
            "artifacts: {decode_int4: {platforms: [ios, mac]}}",
            ["platforms[1]: found 'mac'", "Did you mean macos?"],
        ),
        (
            "artifacts: {decode_int4_tbl: {context: 2048}}",
            [
                "decode_int4_tbl.platforms: without it, ['macos', 'ios'] with context 2048",
                "iOS miscompiles",
                "ring",
            ],
        ),
        (
            "artifacts: {stateful_fp32: {platforms: [ios]}}",
            ["stateful_fp32.platforms: found ['ios']", "several positions in one call, which aborts on iOS"],
        ),
        (
            "folders: {gpu-pipelined: {bundles: {x: core_int8}}}",
            ["bundles.x: artifact core_int8 is of form host"],
        ),
        (
            "folders: {gpu-pipelined: {bundles: {x: y}}}",
            ["gpu-pipelined.bundles.x: there is no artifact 'y'"],
        ),
        (
            "folders: {gpu-pipelined: {tables: [gather_raw]}}",
            ["gpu-pipelined.tables: found ['gather_raw']; driver"],
        ),
        (
            "folders: {new: {driver: decode, bundles: {x: decode_int4}, tokenizer: true}}",
            ["folders.new.tables_in: missing; driver decode needs the folder that holds the bundles' tables"],
        ),
        (
            "{artifacts: {other: {form: raw_tables, name: other}, decode_int4: {tables: other}}}",
            [
                "gpu-pipelined.bundles.provider: artifact decode_int4 reads the tables other, but folders.ios-frontend"
            ],
        ),
        (
            "artifacts: {gather_raw: {name: gemma4_chunks_plan.json}}",
            ["'gemma4_chunks_plan.json' is reserved"],
        ),
        ("folders: {LICENSE: {tables: [gather_raw]}}", ["folders.LICENSE: ", "licence files"]),
    ],
)
def test_a_mistake_is_named_with_its_cure(text, words):
    message = problems(text)
    for word in words:
        assert word in message
    assert "\n" in message
    assert "'additionalProperties'" not in message


# --- gates that could not be judged ------------------------------------------------------------------------------

TABLES_ONLY = "folders: {macos: null, ios-gpu: null, ios-ane: null, gpu-pipelined: null}"
NO_CHAT = f"{{{TABLES_ONLY}}}"
BARE = f"{{{TABLES_ONLY}, gates: {{evidence: []}}}}"
FRONT_END = f"{{{TABLES_ONLY}, gates: {{evidence: [frontend_int8]}}}}"
NO_KERNELS = """
folders: {macos: {bundles: {core: core_int8, head: head_int8}}, ios-gpu: null}
gates: {evidence: [core_metal_int8_fp32]}
"""
HELLO = "{name: hello, turns: [Hello], new_tokens: 8}"


def requiring(gate, text, dialogues=None):
    """The default with one required gate and none reported, with an overlay and other dialogues."""
    raw = overlay(changed(text), {"gates": {"required": [gate], "reported": []}})
    if dialogues:
        raw = overlay(raw, {"oracle": {"dialogues": yaml.safe_load(dialogues)}})
    return raw


def ids(count):
    return [2] * count


@pytest.mark.parametrize(
    "gate", [gate for gate in GATES if gate != "agreement"]
)  # it compares what others found
def test_every_gate_can_be_required_of_the_default_alone(gate):
    assert load_config(requiring(gate, "{}")).gates.required == (gate,)


@pytest.mark.parametrize(
    ("gate", "text", "words"),
    [
        ("tokens", NO_CHAT, "no folder has a driver"),
        ("long_run", NO_CHAT, "no folder has a driver"),
        ("chat", NO_CHAT, "no folder has a driver"),
        ("structure", BARE, "no folder holds a bundle and gates.evidence names none"),
        ("numbers", BARE, "no folder holds a bundle"),
        ("quantization", BARE, "no bundle of a folder or of gates.evidence has a recipe"),
        ("quantization", FRONT_END, "has a recipe"),
        (
            "tables",
            "folders: {ios-gpu: null, ios-ane: null, gpu-pipelined: null, ios-frontend: null}",
            "no folder holds raw tables",
        ),
        ("ane", BARE, "no folder holds a bundle for the Neural Engine"),
        ("chunks", "folders: {ios-ane: null}", "no folder has the driver chunks"),
        ("fp16", "folders: {ios-ane: null}", "no folder has the driver chunks"),
        (
            "agreement",
            "folders: {ios-ane: null, ios-gpu: null, gpu-pipelined: null}",
            "fewer than two folders have a driver",
        ),
        ("kernels", BARE, "no folder holds a bundle with Metal kernels"),
        ("kernels", NO_KERNELS, "no folder holds a bundle with Metal kernels"),
        ("gpu", NO_CHAT, "no folder with a driver holds a bundle with Metal kernels"),
        ("gpu", NO_KERNELS, "no folder with a driver holds a bundle with Metal kernels"),
    ],
)
def test_a_required_gate_without_a_target_is_refused(gate, text, words):
    with pytest.raises(UserError) as caught:
        load_config(requiring(gate, text))
    assert f"gates.required: has {gate}, but " in str(caught.value) and words in str(caught.value)
    load_config(overlay(changed(text), {"gates": {"required": [], "reported": []}}))  # the rest of it is fine


def test_agreement_without_a_gate_that_feeds_dialogues_is_refused():
    with pytest.raises(UserError, match="compares the ids of tokens, long_run, chat, and none of them is"):
        load_config(requiring("agreement", "{}"))
    beside = overlay(requiring("agreement", "{}"), {"gates": {"required": ["agreement", "tokens"]}})
    assert load_config(beside).agreeing() == ("tokens",)


def test_a_reported_gate_is_not_required_too_and_has_something_to_judge():
    twice = overlay(requiring("gpu", "{}"), {"gates": {"reported": ["chat", "gpu"]}})
    with pytest.raises(UserError, match=r"gates\.reported: has gpu, which gates\.required has, too"):
        load_config(twice)
    idle = overlay(requiring("tables", NO_CHAT), {"gates": {"reported": ["gpu"]}})
    with pytest.raises(UserError, match=r"gates\.reported: has gpu, but no folder with a driver holds"):
        load_config(idle)
    assert load_config(overlay(idle, {"gates": {"reported": []}})).gates.reported == ()


@pytest.mark.parametrize(
    ("gate", "text"), [("structure", NO_CHAT), ("numbers", NO_CHAT), ("structure", FRONT_END)]
)
def test_evidence_is_a_target_too(gate, text):
    assert load_config(requiring(gate, text)).gates.required == (gate,)


@pytest.mark.parametrize(
    ("gate", "dialogue", "fine"),
    [
        # a prompt of ids and an expected answer are known; the last id of an answer is not fed
        ("tokens", {"prompt_ids": ids(256), "new_tokens": 8}, False),
        ("tokens", {"prompt_ids": ids(255), "new_tokens": 64}, True),
        ("tokens", {"prompt_ids": ids(250), "new_tokens": 8, "expect_ids": ids(6)}, True),
        ("tokens", {"prompt_ids": ids(250), "new_tokens": 8, "expect_ids": ids(7)}, False),
        ("tokens", {"turns": ["x"], "new_tokens": 256}, True),  # it may stop early
        ("tokens", {"turns": ["x"], "new_tokens": 256, "expect_ids": ids(256)}, False),
        ("long_run", {"prompt_ids": ids(1), "new_tokens": 255}, False),
        ("long_run", {"prompt_ids": ids(1), "new_tokens": 256}, True),
        ("long_run", {"prompt_ids": ids(200), "new_tokens": 57}, True),
        ("long_run", {"prompt_ids": ids(200), "new_tokens": 57, "expect_ids": ids(56)}, False),
        ("long_run", {"turns": ["x"], "new_tokens": 255}, False),
        ("long_run", {"turns": ["x"], "new_tokens": 256}, True),
        ("gpu", {"prompt_ids": ids(256), "new_tokens": 8}, False),
        ("gpu", {"prompt_ids": ids(255), "new_tokens": 64}, True),
        ("numbers", {"turns": ["x"], "new_tokens": 1}, False),
        ("numbers", {"turns": ["x"], "new_tokens": 1, "numbers": True}, True),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_a_required_gate_needs_a_dialogue_that_belongs_to_it(gate, dialogue, fine):
    raw = overlay(
        requiring(gate, "folders: {ios-ane: null}"), {"oracle": {"dialogues": [{"name": "a", **dialogue}]}}
    )
    if fine:
        load_config(raw)
    else:
        with pytest.raises(UserError, match=f"gates.required: has {gate}, but .*oracle.dialogues"):
            load_config(raw)


@pytest.mark.parametrize(
    ("gate", "dialogue", "words"),
    [
        ("tokens", {"prompt_ids": ids(65), "new_tokens": 1}, "more than the 64 positions of folders.ios-ane"),
        ("tokens", {"prompt_ids": ids(60), "new_tokens": 6, "expect_ids": ids(6)}, "64 positions"),
        ("tokens", {"prompt_ids": ids(64), "new_tokens": 9}, None),  # it may stop early
        ("chunks", {"turns": ["x"], "new_tokens": 1}, "has numbers: true to compare"),
        ("fp16", {"turns": ["x"], "new_tokens": 1}, "has numbers: true to compare"),
        ("fp16", {"turns": ["x"], "new_tokens": 1, "numbers": True}, None),
    ],
)
def test_a_folder_with_few_positions_needs_a_dialogue_that_fits(gate, dialogue, words):
    raw = overlay(requiring(gate, "{}"), {"oracle": {"dialogues": [{"name": "a", **dialogue}]}})
    if words is None:
        load_config(raw)
    else:
        with pytest.raises(UserError, match=f"gates.required: has {gate}, but .*{words}"):
            load_config(raw)


def test_linear_codes_are_refused_for_the_engine():
    """Whatever the schema offers for other forms."""
    raw = changed("artifacts: {chunk1: {recipe: int4-linear-b32}}")
    said = list(engine_problems("artifacts.chunk1", raw["artifacts"]["chunk1"], raw))
    assert len(said) == 1 and "found 'int4-linear-b32'; form ane_chunk is for the Neural Engine" in said[0]
    assert (
        "linear codes do not compile for it. allowed: fp32, fp16, int8-kmeans-g32, int8-kmeans-g32-optimal, "
        "int4-kmeans-g32" in said[0]
    )
    linear = {
        name
        for name, recipe in RECIPES.items()
        if any(isinstance(encoding, LinearEncoding) for encoding in recipe.encodings.values())
    }
    assert {*ENGINE_RECIPES} == RECIPES.keys() - linear


def test_the_engine_counts_as_far_as_its_authoring_says():
    from workflow_scripts.model.ane_layers import LAST_EXACT

    assert ENGINE_CONTEXT == LAST_EXACT


def test_a_dialogue_may_fill_the_context_to_the_last_position():
    raw = overlay(
        requiring("tokens", "{context: 10, folders: {ios-ane: null}}"),
        {"oracle": {"dialogues": [yaml.safe_load(HELLO)]}},
    )
    load_config(raw)
    raw["oracle"]["dialogues"] = [{"name": "a", "prompt_ids": ids(3), "new_tokens": 8}]
    load_config(raw)
    raw["oracle"]["dialogues"][0]["new_tokens"] = 9
    with pytest.raises(UserError, match="do not fit context: 10"):
        load_config(raw)


@pytest.mark.parametrize(
    "dialogue",
    [
        {"turns": ["Hello"], "expect_text": "The capital of France is Paris.", "stops": True},
        {"turns": ["What is the capital of France?"], "stops": True},
        {"turns": ["What is the capital of France?"], "expect_text": "Paris.", "stops": True},
        {"turns": ["What is the capital of France?"], "expect_text": "The capital of France is Paris."},
        {
            "turns": ["Hello", "What is the capital of France?"],
            "expect_text": "The capital of France is Paris.",
        },
    ],
)
def test_the_chat_of_another_model_is_not_taken_over_silently(dialogue):
    raw = requiring("chat", "{}")
    raw["oracle"]["dialogues"] = [{"name": "a", "new_tokens": 8, **dialogue}]
    with pytest.raises(UserError, match=r"gates\.chat\[0\]: "):
        load_config(raw)


def test_targets_of_the_default_s_gates():
    config = load_config(DEFAULT)
    judged = config.judged().values()
    bundles = {a.published for a in judged if a.is_bundle}
    assert {Path(name).stem.removeprefix("gemma4_tiny_") for name in bundles} == {
        "frontend_int8",
        "hostcache_L10_fp32",
        *(f"hostcache_{part}_int8" for part in ("chunk1", "chunk2", "chunk3")),
        *("hostcache_producers_int8_fp32", "hostcache_readers_int8_fp32", "head_argmax_int8"),
        *("metal_int8v3_L10", "metal_int8v3_L10_fp32", "head_argmax_kernel"),
        *("metal_int4km_L10", "metal_int4km_L10_fp32", "head_argmax_int4km"),
        *("decode_int4lin", "decode_int4lin_tbl", "decode_int4lin_tbl_ring", "decode_int4lin_tbl_fp32"),
        "ring_L10_fp32",
    }
    engine = {name for name in bundles if "_chunk" in name or "_argmax_int8." in name}
    shipped_kernels = {name for name in bundles if "_metal_" in name or "_argmax_" in name} - engine
    shipped_kernels -= {name for name in bundles if "_fp32" in name}
    assert {gate: set(config.gate_targets(gate, judged)) for gate in GATES} == {
        "structure": bundles,
        "numbers": bundles,
        "kernels": shipped_kernels,
        "ane": engine,
        "quantization": {"fp32", "int4-kmeans-g32", "int4-linear-b32", "int8-kmeans-g32"},
        "tables": {"gemma4_gather_raw"},
        **{gate: {"macos", "ios-gpu", "ios-ane", *PIPELINED} for gate in ("tokens", "long_run", "chat")},
        "agreement": {"folders"},
        "gpu": {"macos", "ios-gpu"},
        **{gate: {"ios-ane"} for gate in ("chunks", "fp16")},
    }


def test_all_mistakes_are_told_together():
    message = problems("{contxt: 1, slug: A, oracle: {min_margin: -1}}")
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize("raw", [None, [], "text", {}, {"model": {}}, {"artifacts": None, "folders": []}])
def test_what_is_no_configuration_is_refused(raw):
    with pytest.raises(UserError):
        load_config(raw)


def test_schema_and_tables_of_the_code_name_the_same_things():
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    artifact = schema["properties"]["artifacts"]["additionalProperties"]["properties"]
    folder = schema["properties"]["folders"]["additionalProperties"]["properties"]
    assert artifact["form"]["enum"] == list(FORMS)
    assert artifact["recipe"]["enum"] == list(RECIPES)
    assert folder["driver"]["enum"] == list(DRIVERS)
    assert {form for roles in DRIVERS.values() for forms in roles.values() for form in forms} <= FORMS.keys()
    assert schema["$defs"]["gate"]["enum"] == list(GATES)


def test_kernels_find_the_palettes_that_the_recipes_make():
    read = ("layers.0.mlp.up_proj.weight", HEAD_WEIGHT)  # by the kernels of a core and of a head
    stored = {name: [recipe.encoding(tensor) for tensor in read] for name, recipe in RECIPES.items()}
    palettes = {
        name: {encoding.bits for encoding in encodings}
        for name, encodings in stored.items()
        if all(isinstance(encoding, PaletteEncoding) for encoding in encodings)
    }
    assert palettes == {name: {bits} for name, bits in KERNEL_BITS.items()}


def walk(schema, path=""):
    """Every key path of the schema with its node."""
    for key, node in schema.get("properties", {}).items():
        below = f"{path}.{key}" if path else key
        yield below, node
        yield from walk(node, below)
        if "items" in node:
            yield from walk(node["items"], f"{below}[]")
        if isinstance(node.get("additionalProperties"), dict):
            yield from walk(node["additionalProperties"], f"{below}.<name>")


def test_every_key_is_described_and_closed():
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    for path, node in [("top", schema), *walk(schema)]:
        assert node["description"].strip(), path
        if node.get("type") == "object":
            assert "additionalProperties" in node, path


def test_manual_and_schema_have_the_same_keys():
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    manual = (ROOT / "config/README.md").read_text(encoding="utf-8")
    tables = re.findall(r"\| key \|.*?(?=\n\n)", manual, flags=re.DOTALL)
    documented = [key for table in tables for key in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    assert sorted(documented) == sorted(path for path, _ in walk(schema))
    forms = re.findall(
        r"^\| `(\w+)` \| .*\| (.*)\|$", manual.partition("| form |")[2].partition("\n\n")[0], re.M
    )
    needs = {name: {need.strip() for need in text.split(",")} - {""} for name, text in forms}
    assert needs == {name: {*form.needs} for name, form in FORMS.items()}


def test_examples_of_the_manual_load():
    manual = (ROOT / "config/README.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", manual, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        load_config(changed(example))


def test_manual_names_every_gate():
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    gates = schema["$defs"]["gate"]["enum"]
    manual = (ROOT / "config/README.md").read_text(encoding="utf-8")
    table = manual.partition("| gate | over |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == gates == list(GATES)


def test_long_run_means_the_same_to_the_gate():
    from workflow_scripts.gates import tokens

    assert meaning.LONG_RUN == tokens.LONG_RUN


def test_names_that_a_release_takes_are_those_it_writes():
    """Every upper-case name of `release.names` is one or the other kind of reserved name."""
    from workflow_scripts.release import names

    written = {value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)}
    assert written == {*meaning._IN_A_FOLDER, *meaning._IN_A_RELEASE}


def test_targets_are_no_folder_names():
    snakefile = (ROOT / "Snakefile").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^# Targets: +(.*(?:\n#  +.*)*)$", snakefile, re.MULTILINE)
    assert set(re.findall(r"\w+", listed.replace("(default)", ""))) == set(meaning._TARGETS)
