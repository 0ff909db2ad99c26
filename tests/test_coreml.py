"""The Core ML reference: its head's rows, its program in torch, and, with coremltools, the package and its gates."""

import json
import os
import shutil
import subprocess
import sys

import gate_inputs as given
import numpy as np
import pytest
import torch
import yaml
from gate_inputs import judge

from tests.conftest import ROOT, TINY
from workflow_scripts import closure
from workflow_scripts.config import load_config, overlay
from workflow_scripts.configuration.data import COREML_RECIPES
from workflow_scripts.configuration.shape import SCHEMA
from workflow_scripts.coreml.contents import interface, stored_linear, token_part
from workflow_scripts.coreml.decoder import exported, state_decoder
from workflow_scripts.coreml.installed import VERSION, why_no_core_ml, why_no_coremltools
from workflow_scripts.coreml.pruned_head import HEAD_ROWS, kept_ids, read_head_rows, write_head_rows
from workflow_scripts.doctor import read_pins
from workflow_scripts.errors import UserError
from workflow_scripts.gates.bounds import FP32_LOGITS
from workflow_scripts.gates.oracle import Oracle
from workflow_scripts.manifest import manifest_path
from workflow_scripts.model.names import HEAD_WEIGHT
from workflow_scripts.quantize.weights import Weights
from workflow_scripts.tables.raw import RawTables

TOKENIZER = TINY / "tokenizer.json"
LINEAR = "int4-linear-b32"
BASIC = 504  # ids of the tiny tokenizer that no merge makes
ROWS, CONTEXT = 600, 64
MISSING = why_no_coremltools()
needs_coremltools = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
READS = "the target is read and runs"


# The head's rows


def vocabulary():
    raw = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    vocab = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    return vocab, ["".join(pair) for pair in raw["model"]["merges"]]


def test_the_smallest_head_keeps_what_no_merge_makes():
    vocab, made = vocabulary()
    ids = kept_ids(TOKENIZER, BASIC)
    assert ids == sorted({*vocab.values()} - {vocab[token] for token in made})
    assert {vocab["<bos>"], vocab["<turn|>"], vocab["<0x0A>"], vocab["a"], vocab["▁"]} <= {*ids}


def test_a_larger_head_takes_the_first_merges_in_their_order():
    vocab, made = vocabulary()
    more = {*kept_ids(TOKENIZER, BASIC + 10)} - {*kept_ids(TOKENIZER, BASIC)}
    assert more == {vocab[token] for token in made[:10]}
    ids = kept_ids(TOKENIZER, len(vocab))
    assert ids == sorted(vocab.values())


@pytest.mark.parametrize(
    ("rows", "words"), [(BASIC - 1, f"set it to {BASIC} or more"), (1025, "1024 ids: set it to at most that")]
)
def test_a_number_of_rows_that_cannot_be_is_refused_with_one_that_can(rows, words):
    with pytest.raises(UserError, match=f"coreml.head_rows is {rows}, .*{words}"):
        kept_ids(TOKENIZER, rows)


def test_older_tokenizer_files_give_the_same_rows(tmp_path):
    raw = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert kept_ids(tmp_path / "tokenizer.json", ROWS) == kept_ids(TOKENIZER, ROWS)


def test_a_special_token_stays_though_a_merge_makes_it(tmp_path):
    """Without a stop token nothing would ever end."""
    raw = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    raw["model"]["merges"].append(["<turn", "|>"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert kept_ids(tmp_path / "tokenizer.json", BASIC) == kept_ids(TOKENIZER, BASIC)


@pytest.mark.parametrize("text", [None, "{", '{"model": {"vocab": {}}}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer with merges"):
        kept_ids(tmp_path / "tokenizer.json", ROWS)


def test_the_file_of_rows_comes_back_and_a_damaged_one_is_named(tmp_path):
    write_head_rows(tmp_path, [3, 5, 8])
    assert read_head_rows(tmp_path) == [3, 5, 8]
    for text in ("[]", "{", '{"format": 1, "token_ids": [1.5]}', '{"format": 2, "token_ids": [1]}'):
        (tmp_path / HEAD_ROWS).write_text(text)
        with pytest.raises(UserError, match=HEAD_ROWS):
            read_head_rows(tmp_path)


# Configuration, rules and environment


DEFAULT = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))


def problems(text):
    with pytest.raises(UserError) as caught:
        load_config(overlay(DEFAULT, yaml.safe_load(text)))
    return str(caught.value)


def test_the_section_is_optional_and_adds_its_recipe():
    config = load_config(DEFAULT)
    assert (config.coreml.recipe, config.coreml.tables) == (LINEAR, "gemma4_gather_raw")
    without = load_config(overlay(DEFAULT, {"coreml": None}))
    assert without.coreml is None
    other = load_config(overlay(DEFAULT, {"coreml": {"recipe": "int4-linear-b32-sym"}}))
    assert {*other.recipes()} - {*without.recipes()} == {"int4-linear-b32-sym"}


def test_a_model_that_calls_its_tables_otherwise_needs_no_edit_here():
    """No release is refused for the extra."""
    renamed = overlay(
        DEFAULT, {"artifacts": {"gather_raw": None, "my_raw": DEFAULT["artifacts"]["gather_raw"]}}
    )
    for entry in filter(None, renamed["artifacts"].values()):
        if entry.get("tables") == "gather_raw":
            entry["tables"] = "my_raw"
    renamed["folders"]["ios-frontend"]["tables"] = ["my_raw"]
    assert load_config(renamed).coreml.tables == load_config(DEFAULT).coreml.tables


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "coreml: {recipe: int8-linear-b32}",
            "coreml.recipe: found 'int8-linear-b32'; allowed: int4-linear-b32",
        ),
        ("coreml: {tables: gather}", "coreml.tables: there is no artifact 'gather'"),
        ("coreml: {tables: core_int8}", "coreml.tables: artifact core_int8 is of form hostcache_core"),
        ("coreml: {head_rows: 0}", "coreml.head_rows: found 0, needs 1 to"),
        ("coreml: {context: 1}", "coreml.context: found 1, needs 2 to"),
        ("coreml: {rows: 5}", "coreml.rows: unknown key"),
    ],
)
def test_a_mistake_in_the_section_is_named(text, words):
    assert words in problems(text)


def test_the_schema_allows_the_recipes_of_linear_codes_in_4_bits():
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    assert schema["properties"]["coreml"]["properties"]["recipe"]["enum"] == list(COREML_RECIPES)


def test_the_version_is_the_pinned_one():
    assert read_pins(ROOT / "envs/coreml.txt")["coremltools"] == VERSION


def test_nothing_of_a_release_feels_the_extra():
    stages = {path.stem for path in (closure.PACKAGE / "stages").glob("*.py")} - {"__init__", "job", "runner"}
    room = closure.PACKAGE / "coreml"
    users = {stage for stage in stages if any(room in path.parents for path in closure.stage_sources(stage))}
    gates = {f"gate_coreml_{gate}" for gate in ("structure", "numbers", "prediction")}
    assert users == {"export_coreml"} | gates


def plan(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    command = [
        sys.executable,
        "-m",
        "snakemake",
        "-n",
        "coreml_reference",
        "--configfile",
        tmp_path / "mine.yaml",
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_config_without_the_section_is_told_so(tmp_path):
    told = plan(tmp_path, "coreml: null\n")
    assert told.returncode and "the config has no section coreml" in told.stdout + told.stderr


@pytest.mark.skipif(MISSING is None, reason="coremltools is installed")
def test_an_environment_without_coremltools_is_told_what_to_install(tmp_path):
    told = plan(tmp_path, "model: gemma-4-tiny\n")
    assert (
        told.returncode
        and "pip install -r envs/requirements.txt -r envs/coreml.txt" in told.stdout + told.stderr
    )


@needs_coremltools
@needs_coremltools
def test_a_head_that_is_too_small_is_refused_before_any_work(tmp_path):
    told = plan(tmp_path, "coreml: {head_rows: 100}\n")
    assert told.returncode == 1 and f"set it to {BASIC} or more" in told.stdout + told.stderr


@needs_coremltools
def test_what_it_would_take_is_told(tmp_path):
    command = [sys.executable, "-m", "workflow_scripts", "plan", "coreml_reference"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "\ncoreml " in told.stdout and "bytes of 1 jobs are unknown" in told.stdout


@needs_coremltools
def test_the_plan_of_the_target_has_its_stages_and_no_release(tmp_path):
    told = plan(tmp_path, "model: gemma-4-planned\n").stdout
    assert all(f"gate coreml_{gate}" in told for gate in ("structure", "numbers", "prediction"))
    assert "assemble_release" not in told and "gate_tokens" not in told


def test_only_a_mac_can_predict():
    assert "no Core ML" in why_no_core_ml("none")
    assert "macOS 14.7" in why_no_core_ml("14.7")
    assert why_no_core_ml("15.0") is None and why_no_core_ml("27.1.2") is None


# The program in torch


@pytest.fixture(scope="module")
def evidence(run_stage, tiny_checkpoint, tiny_tables):
    """Inputs of the gates, but for the package."""
    found = given.recipe_evidence(run_stage, tiny_checkpoint, LINEAR)
    inputs = {name: manifest_path(found[name]) for name in ("weights", "oracle")}
    inputs["tables"] = manifest_path(tiny_tables)
    reference = run_stage("decode_reference", "coreml", inputs)
    return found | {"tables": tiny_tables, "reference": reference}


def test_the_exported_program_gives_the_references_logits_of_the_kept_ids(evidence):
    """In float32 with the same codes; more positions than the window has, so that the ring goes around."""
    weights, tables = Weights.open(evidence["weights"]), RawTables.open(evidence["tables"])
    ids = kept_ids(TOKENIZER, ROWS)
    program = exported(state_decoder(weights, tables, ids, CONTEXT), interface(weights, CONTEXT, ROWS))
    step = program.module()
    tokens = Oracle.open(evidence["oracle"]).dialogues["france"].fed_ids
    assert len(tokens) > 2 * weights.config.sliding_window
    rows = [
        step(
            torch.tensor([[token]], dtype=torch.int32),
            torch.tensor([[position]], dtype=torch.int32),
            torch.from_numpy(token_part(tables, token)),
        ).reshape(-1)
        for position, token in enumerate(tokens)
    ]
    with np.load(evidence["reference"] / "measured.npz") as arrays:
        expected = arrays["france.logits"][:, ids]
    assert np.abs(torch.stack(rows).detach().numpy() - expected).max() <= FP32_LOGITS


def test_the_head_has_the_kept_rows_and_a_recipe_without_4_bits_is_refused(evidence, tiny_weights):
    whole = Weights.open(evidence["weights"])
    ids = kept_ids(TOKENIZER, ROWS)
    head = stored_linear(whole, HEAD_WEIGHT, ids)
    assert np.array_equal(head.dequantize(), whole.linear(HEAD_WEIGHT).dequantize()[ids])
    with pytest.raises(UserError, match=r"int8-kmeans-g32 stores embed_tokens\.weight otherwise"):
        stored_linear(Weights.open(tiny_weights["int8-kmeans-g32"]), HEAD_WEIGHT, ids)


def test_more_positions_than_the_model_was_made_for_are_refused(evidence):
    with pytest.raises(UserError, match="context is 100000"):
        interface(Weights.open(evidence["weights"]), 100_000, ROWS)


# The package


@pytest.fixture(scope="module")
def package(run_stage, evidence):
    """A real reference of the embedded checkpoint."""
    pytest.importorskip("coremltools", reason="coremltools is not installed: make test-coreml")
    inputs = {name: manifest_path(evidence[name]) for name in ("weights", "tables", "checkpoint")}
    return run_stage("export_coreml", "tiny_coreml", inputs, head_rows=ROWS, context=CONTEXT)


@pytest.fixture
def damaged(package, tmp_path):
    """A copy that a test may change."""
    copy = tmp_path / "damaged" / package.name
    shutil.copytree(package, copy)
    return copy


def model_of(folder):
    return folder / f"{folder.name}.mlpackage/Data/com.apple.CoreML/model.mlmodel"


def edit(folder, change):
    """Change the specification of a package: `change` gets it and the operations of its program."""
    from coremltools.proto import Model_pb2

    model = Model_pb2.Model.FromString(model_of(folder).read_bytes())
    change(model, model.mlProgram.functions["main"].block_specializations["CoreML8"].operations)
    model_of(folder).write_bytes(model.SerializeToString(deterministic=True))


def structure(evidence, folder, out):
    inputs = {name: evidence[name] for name in ("weights", "tables", "checkpoint")} | {"package": folder}
    return judge("gate_coreml_structure", inputs, out, head_rows=ROWS, context=CONTEXT)


def numbers(evidence, folder, out):
    inputs = {name: evidence[name] for name in ("weights", "tables", "oracle", "reference")}
    return judge("gate_coreml_numbers", inputs | {"package": folder}, out, context=CONTEXT)


@needs_coremltools
def test_the_package_passes_its_gates_and_prediction_says_why_it_did_not_run(evidence, package, tmp_path):
    assert structure(evidence, package, tmp_path / "structure") == {}
    assert numbers(evidence, package, tmp_path / "numbers") == {}
    names = ("weights", "tables", "oracle", "reference")
    inputs = {name: evidence[name] for name in names} | {"package": package}
    assert judge("gate_coreml_prediction", inputs, tmp_path / "run", context=CONTEXT, macos="none") == {}
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    assert verdict["verdict"] == "not_run" and "no Core ML" in verdict["reason"]


@needs_coremltools
def test_another_process_gives_the_same_bytes(evidence, package, tmp_path):
    inputs = [f"{name}={manifest_path(evidence[name])}" for name in ("weights", "tables", "checkpoint")]
    output = tmp_path / "elsewhere" / f"{package.name}.manifest.json"
    arguments = ["--input", *inputs, "--params", json.dumps({"head_rows": ROWS, "context": CONTEXT})]
    places = ["--output", output, "--log", tmp_path / "a.log", "--store", "off"]
    surroundings = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "workflow_scripts", "stage", "export_coreml", *arguments, *places]
    subprocess.run(command, env=surroundings, cwd=ROOT, check=True)
    assert output.read_bytes() == manifest_path(package).read_bytes()


@needs_coremltools
def test_rows_that_are_named_wrongly_are_found(evidence, damaged, tmp_path):
    ids = read_head_rows(damaged)
    write_head_rows(damaged, [ids[1], ids[0], *ids[2:]])
    (found,) = structure(evidence, damaged, tmp_path / "out").values()
    assert found == f"{ROWS} ids, row 0 is {ids[1]}, not {ids[0]}"


@needs_coremltools
def test_a_head_with_its_rows_in_another_order_is_found(evidence, package, tmp_path):
    """What the file says is right, and what the package holds is not."""
    from workflow_scripts.coreml.convert import convert

    weights, tables = Weights.open(evidence["weights"]), RawTables.open(evidence["tables"])
    ids, spec = read_head_rows(package), interface(weights, CONTEXT, ROWS)
    other = tmp_path / "damaged" / package.name
    other.mkdir(parents=True)
    convert(
        exported(state_decoder(weights, tables, ids[::-1], CONTEXT), spec),
        spec,
        other / f"{other.name}.mlpackage",
    )
    write_head_rows(other, ids)
    failed = structure(evidence, other, tmp_path / "structure")
    assert failed[f"{matrices(weights)} matrices with the recipe's codes and steps"] == (
        f"1 missing, first {HEAD_WEIGHT}"
    )
    assert any("decode reference" in name for name in numbers(evidence, other, tmp_path / "numbers"))


def matrices(weights):
    return sum(entry["kind"] == "linear" for entry in weights.index.values())


@needs_coremltools
def test_every_changed_code_is_found(evidence, damaged, tmp_path):
    blob = damaged / f"{damaged.name}.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    weights = Weights.open(evidence["weights"])
    name = "layers.3.mlp.up_proj.weight"
    codes = weights.linear(name).codes.reshape(-1).astype(np.uint8) & 15
    packed = (codes[::2] | codes[1::2] << 4).tobytes()  # two codes in a byte, the first one low
    data = blob.read_bytes()
    assert data.count(packed) == 1
    place = data.index(packed) + 40
    blob.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
    failed = structure(evidence, damaged, tmp_path / "out")
    assert failed == {
        f"{matrices(weights)} matrices with the recipe's codes and steps": f"1 missing, first {name}",
        "other matrices": "1",
    }


@needs_coremltools
def test_a_state_that_is_never_written_is_found(evidence, damaged, tmp_path):
    def forget(model, operations):
        index = next(
            i
            for i, op in enumerate(operations)
            if op.type == "write_state" and "fullValueCache" in str(op.inputs)
        )
        del operations[index]

    edit(damaged, forget)
    assert structure(evidence, damaged, tmp_path / "structure") == {
        "state fullValueCache": "read 1 times, written 0 times"
    }
    assert any("decode reference" in name for name in numbers(evidence, damaged, tmp_path / "numbers"))


def _other_gelu(model, operations):
    """What coremltools makes of a gelu whose approximation it does not see."""
    for op in operations:
        value = op.attributes["val"].immediateValue.tensor.strings.values if op.type == "const" else ()
        if list(value) == ["TANH_APPROXIMATION"]:
            value[0] = "EXACT"


def _other_norm(model, operations):
    """Another power in one norm."""
    for op in operations:
        value = op.attributes["val"].immediateValue.tensor.floats.values if op.type == "const" else ()
        if list(value) == [-0.5]:
            value[0] = -0.499
            return


@needs_coremltools
@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (_other_gelu, READS, "gelu of mode EXACT"),
        (_other_norm, "france: logits with float32 states", "at position"),
    ],
)
def test_a_graph_that_computes_something_else_is_found(evidence, damaged, tmp_path, change, check, words):
    before = model_of(damaged).read_bytes()
    edit(damaged, change)
    assert model_of(damaged).read_bytes() != before
    failed = numbers(evidence, damaged, tmp_path / "out")
    assert any(name.startswith(check) and words in found for name, found in failed.items()), failed


@needs_coremltools
@pytest.mark.parametrize(
    ("change", "check", "found"),
    [
        (
            lambda model, _: model.description.metadata.userDefined.update({"conversion_date": "x"}),
            "no date",
            "a date",
        ),
        (lambda model, _: setattr(model, "specificationVersion", 8), READS, "No available version"),
        (lambda model, _: setattr(model.description.input[0], "name", "ids"), "inputs", "ids"),
    ],
)
def test_what_a_package_says_of_itself_is_judged(evidence, damaged, tmp_path, change, check, found):
    edit(damaged, change)
    failed = structure(evidence, damaged, tmp_path / "out")
    assert any(check in name and found in text for name, text in failed.items()), failed


@needs_coremltools
def test_a_damaged_file_is_a_verdict_and_no_traceback(evidence, damaged, tmp_path):
    model_of(damaged).write_bytes(b"nothing of the kind")
    for gate in (structure, numbers):
        (found,) = [
            text for name, text in gate(evidence, damaged, tmp_path / gate.__name__).items() if name == READS
        ]
        assert "no program that coremltools can read" in found
