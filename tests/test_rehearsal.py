"""The rehearsal's checkpoint: the same bytes everywhere, the published layout, tame numbers, a fitting tokenizer."""

import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import tiny
from tests.conftest import ROOT, TINY
from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.folder import read_tensors
from workflow_scripts.checkpoint.layout import published_tensors
from workflow_scripts.checkpoint.needed import local_inputs
from workflow_scripts.checkpoint.random_weights import Normal, fill_normal, tensor_key
from workflow_scripts.checkpoint.rehearsal import random_tensor, write_random_weights
from workflow_scripts.checkpoint.rehearsal_files import TOKENIZER_FILES, widen_tokenizer
from workflow_scripts.checkpoint.safetensors import map_tensor
from workflow_scripts.config import load_config, overlay, read_config
from workflow_scripts.errors import UserError
from workflow_scripts.files import tree_files
from workflow_scripts.manifest import manifest_path
from workflow_scripts.release.tokenizer import ChatTokenizer, check_vocabulary

SHAPE = ROOT / "resources" / "rehearsal-e2b" / "config.json"
E2B = parse_text_config(json.loads(SHAPE.read_text(encoding="utf-8")), "config.json")
DIMS = tiny.Dims(vocab_size=2048)  # room for the embedded tokenizer
KEY = tensor_key(1, "a")
PARTS = ((65536**2 - 1) / 3) ** 0.5  # deviation of the sum of four uniform 16-bit numbers


def numbers(key, first, count, normal):
    out = np.empty(count, ml_dtypes.bfloat16)
    fill_normal(out, key, first, normal)
    return out


def rehearsal_inputs(folder, config):
    """What the rule gives to the stage."""
    path = folder / "config.json"
    tiny.write_text(path, config)
    return {"config.json": path, **{name: TINY / name for name in TOKENIZER_FILES}}


@pytest.fixture(scope="module")
def folders(run_stage, tmp_path_factory):
    """Shard bytes -> a rehearsal's folder of a tiny shape."""
    inputs = rehearsal_inputs(tmp_path_factory.mktemp("shape"), tiny.raw_config(DIMS))
    return {
        size: run_stage("rehearsal", f"checkpoint-{size}", inputs, seed=7, shard_bytes=size)
        for size in (None, 300_000)
    }


@pytest.fixture(scope="module")
def opened(folders, tmp_path_factory):
    """The same through stage `checkpoint`."""
    trees = tmp_path_factory.mktemp("trees")
    return {size: tiny.build_tree(folder, trees / str(size)) for size, folder in folders.items()}


# --- the numbers -----------------------------------------------------------------------------------------------------


def by_the_book(key, index, normal):
    """One number in Python's integers and float32 packing, as `random_weights` describes it."""
    mask = 2**64 - 1
    bits = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    bits ^= bits >> 31
    total = sum(bits >> 16 * part & 0xFFFF for part in range(4)) - 131070
    total += round(normal.mean / normal.deviation * PARTS)
    scale = struct.unpack("f", struct.pack("f", normal.deviation / PARTS))[0]
    # A product of two float32 numbers is exact in float64, so packing it rounds once.
    code = struct.unpack("I", struct.pack("f", total * scale))[0]
    return (code + 0x7FFF + (code >> 16 & 1)) >> 16


# The scale of the last one is a power of two, so that many numbers lie halfway between two of bfloat16.
NORMALS = [Normal(0, 0.02), Normal(1, 0.1), Normal(0, 1536**-0.5), Normal(-3, 0.01), Normal(0, PARTS / 2**17)]


@pytest.mark.parametrize("normal", NORMALS)
@pytest.mark.parametrize("first", [0, 2**32 - 3, 2**40])
def test_every_number_is_what_the_description_gives(normal, first):
    found = numbers(KEY, first, 2000, normal).view(np.uint16).tolist()
    assert found == [by_the_book(KEY, first + index, normal) for index in range(2000)]


def test_the_bytes_do_not_change_silently():
    """Figures that people kept of a rehearsal belong to these numbers."""
    digest = hashlib.sha256(numbers(KEY, 0, 100_000, Normal(0, 0.02)).tobytes()).hexdigest()
    assert digest == "b0783454d599de591f60124c1144c1648457d616c8241c7c7308160ac657a394"


def test_the_numbers_are_normal_and_independent_of_their_neighbours():
    values = numbers(KEY, 0, 1 << 20, Normal(0.5, 0.25)).astype(np.float64)
    assert abs(values.mean() - 0.5) < 1e-3 and abs(values.std() - 0.25) < 1e-3
    unit = (values - 0.5) / 0.25
    inside = {1: 0.6827, 2: 0.9545, 3: 0.9973}
    for deviations, share in inside.items():
        assert abs((np.abs(unit) < deviations).mean() - share) < 0.02
    for lag in (1, 2, 96, 1536):
        assert abs((unit[lag:] * unit[:-lag]).mean()) < 5e-3
    other = numbers(tensor_key(1, "b"), 0, 1 << 20, Normal(0, 1)).astype(np.float64)
    assert abs((unit * other).mean()) < 5e-3


def test_a_mean_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="not exact"):
        numbers(KEY, 0, 1, Normal(1000, 1))


# --- the folder ------------------------------------------------------------------------------------------------------


def test_one_file_and_shards_are_the_same_checkpoint(folders, opened):
    single, sharded = (read_tensors(folder) for folder in folders.values())
    assert list(single) == sorted(sharded)
    for name in single:
        assert map_tensor(single[name]).tobytes() == map_tensor(sharded[name]).tobytes(), name
    assert opened[None].digest == opened[300_000].digest
    weights = [path for path in tree_files(folders[300_000]) if path.suffix == ".safetensors"]
    assert len(weights) > 3
    assert weights[-1].name == f"model-{len(weights):05d}-of-{len(weights):05d}.safetensors"
    index = json.loads((folders[300_000] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.size for info in single.values())


def test_shards_hold_as_much_as_they_may(folders):
    infos = read_tensors(folders[300_000]).values()
    sizes = {path: [info.size for info in infos if info.path == path] for path in {i.path for i in infos}}
    assert all(sum(found) <= 300_000 or len(found) == 1 for found in sizes.values())
    assert any(sum(found) > 300_000 for found in sizes.values())  # the tables alone are larger


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
def test_a_tensor_can_be_made_alone_and_in_blocks_of_any_size(folders, block, monkeypatch):
    monkeypatch.setattr("workflow_scripts.checkpoint.rehearsal.BLOCK", block)
    config, stored = tiny.canonical_config(DIMS), read_tensors(folders[None])
    for name in (
        "embed_tokens.weight",
        "layers.9.self_attn.k_proj.weight",
        "layers.3.layer_scalar",
        "norm.weight",
    ):
        published = f"model.language_model.{name}"
        shape = published_tensors(config)[published]
        made = np.concatenate([rows.copy() for rows in random_tensor(7, published, shape, config)])
        assert made.shape == shape and made.tobytes() == map_tensor(stored[published]).tobytes()


def test_another_seed_changes_every_tensor(folders, tmp_path):
    config, stored = tiny.canonical_config(DIMS), read_tensors(folders[None])
    write_random_weights(tmp_path, config, 8, None)
    for name, info in read_tensors(tmp_path).items():
        assert map_tensor(info).tobytes() != map_tensor(stored[name]).tobytes(), name


def test_shared_layers_carry_the_dead_tensors_of_published_ones(folders, opened):
    names = {name.removeprefix("model.language_model.") for name in read_tensors(folders[None])}
    assert names - {*opened[None].names()} == tiny.dead_tensors(DIMS).keys()


def test_e2b_has_the_tensors_of_the_published_checkpoint():
    """540 that are read and 60 dead ones. The latter are what the published base file has more than the QAT one, whose
    decoder lacks them: 10,246,621,918 - 10,208,852,878 bytes, of which the rest is the header's."""
    shapes = published_tensors(E2B)
    assert len(shapes) == 600 and sum(np.prod(shape) for shape in shapes.values()) == 4647449891
    dead = [name for name in shapes if ".self_attn." in name and int(name.split(".")[3]) >= 15]
    dead = [name for name in dead if name.endswith(("k_proj.weight", "v_proj.weight", "k_norm.weight"))]
    assert len(dead) == 60
    header = 37_769_040 - 2 * sum(int(np.prod(shapes[name])) for name in dead)
    assert 100 * 60 < header < 200 * 60


def test_a_shape_that_the_pipeline_refuses_makes_no_weights(run_stage, tmp_path):
    config = tiny.raw_config(DIMS)
    del config["text_config"]["head_dim"]
    with pytest.raises(UserError, match="head_dim is missing"):
        run_stage("rehearsal", "refused", rehearsal_inputs(tmp_path, config), seed=1, shard_bytes=None)


# --- what a model of them does ---------------------------------------------------------------------------------------


def test_rounding_errors_stay_as_small_as_they_are(opened):
    """An input that differs by 1e-7 gives an output that differs by little more; plainly normal weights: by 3e-4."""
    import torch

    from workflow_scripts.gates.make_oracle import load_model

    model = load_model(opened[None])
    ids = torch.tensor([[2, 105, 300, 7, 1500, 42, 9, 800]])
    embedded = model.model.embed_tokens(ids)
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0)) * 1e-7
    per_layer = model.model.get_per_layer_inputs(ids, embedded)
    with torch.no_grad():
        plain, moved = (
            model.model(inputs_embeds=values, per_layer_inputs=per_layer).last_hidden_state
            for values in (embedded, embedded * (1 + noise))
        )
        logits = model(input_ids=ids).logits[0]
    assert ((plain - moved).norm() / plain.norm()).item() < 2e-6
    top = logits.topk(2).values
    assert logits.argmax(1).tolist() == ids[0].tolist()
    assert (top[:, 0] - top[:, 1]).min() > 0.3  # far above any rounding; several times that at full width


# --- the tokenizer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def widened(tmp_path_factory):
    """A folder with the tokenizer that fits E2B's vocabulary."""
    from workflow_scripts.checkpoint.rehearsal_files import write_small_files

    folder = tmp_path_factory.mktemp("widened")
    files = {name: TINY / name for name in TOKENIZER_FILES}
    write_small_files(folder, SHAPE, files, E2B.vocab_size, E2B.max_position_embeddings, 1)
    return folder


def test_the_tokenizer_has_a_token_for_every_id_of_e2b(widened):
    tokenizer = ChatTokenizer.open(widened)
    check_vocabulary(tokenizer, E2B)
    assert tokenizer.size == 262_144
    assert {tokenizer.token(token) for token in (1024, 262_143)} == {"<unused1024>", "<unused262143>"}
    assert len({tokenizer.token(token) for token in range(262_144)}) == 262_144
    assert tokenizer.stop_token_ids == E2B.eos_token_ids == (1, 106)


def test_a_wider_tokenizer_gives_texts_the_same_ids(widened):
    narrow, wide = ChatTokenizer.open(TINY), ChatTokenizer.open(widened)
    for text in ("What is the capital of France?", "« Garçon » 🙂", "<unused5000> a\n\nb"):
        ids = wide.encode(text)
        assert ids == narrow.encode(text) and wide.decode(ids) == narrow.decode(ids)
    chat = [{"role": "user", "content": "Hello"}]
    assert wide.encode_chat(chat) == narrow.encode_chat(chat)


def test_the_oracle_s_library_reads_it_too(widened):
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(widened)) == 262_144


def test_a_tokenizer_that_does_not_fit_is_refused():
    path = TINY / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=r"ids up to 1023, but .* vocab_size of 512"):
        widen_tokenizer(tokenizer, 512, path)
    with pytest.raises(UserError, match="no BPE vocabulary"):
        widen_tokenizer({"model": {"type": "Unigram"}}, 512, path)
    vocabulary = {**tokenizer["model"]["vocab"], "<unused2000>": 1024}
    taken = {**tokenizer, "model": {**tokenizer["model"], "vocab": vocabulary}}
    with pytest.raises(UserError, match="<unused2000> under another id"):
        widen_tokenizer(taken, 4096, path)


def test_a_vocabulary_that_fits_already_is_kept():
    path = TINY / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    assert widen_tokenizer(tokenizer, 1024, path) == tokenizer


# --- a run that is killed --------------------------------------------------------------------------------------------


def test_a_killed_run_leaves_nothing_that_looks_whole(tmp_path):
    large = replace(DIMS, vocab_size=1 << 18)  # 280 MB: long enough to be caught at it
    inputs = rehearsal_inputs(tmp_path, tiny.raw_config(large))
    output = manifest_path(tmp_path / "results" / "checkpoint")
    command = [sys.executable, "-m", "workflow_scripts", "stage", "rehearsal"]
    command += ["--input", *(f"{name}={path}" for name, path in inputs.items())]
    command += ["--params", '{"seed": 1, "shard_bytes": 100000000}', "--output", str(output)]
    command += ["--log", str(tmp_path / "log"), "--store", "off"]
    job = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    while job.poll() is None and not [*tmp_path.glob("results/.tmp-*/checkpoint/*.safetensors")]:
        time.sleep(0.002)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "results").iterdir()]
    assert left and all(name.startswith(".") for name in left)
    assert subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert {"source/model.safetensors.index.json"} < local_inputs(tmp_path / "results/checkpoint").keys()
    assert not [*tmp_path.glob("results/.tmp-*")]


# --- the configuration -----------------------------------------------------------------------------------------------


def test_the_shipped_rehearsal_is_e2b():
    config = read_config([ROOT / "config" / "rehearsal-e2b.yaml"])
    assert config.checkpoint.rehearsal.config == SHAPE.relative_to(ROOT).as_posix()
    assert config.num_hidden_layers == E2B.num_hidden_layers
    real = read_config([ROOT / "config" / "gemma-4-e2b.yaml"])
    assert [folder.artifacts for folder in config.folders.values()] == [
        f.artifacts for f in real.folders.values()
    ]
    assert {key: (a.form, a.recipe, a.context, a.layers) for key, a in config.artifacts.items()} == {
        key: (a.form, a.recipe, a.context, a.layers) for key, a in real.artifacts.items()
    }
    assert not {"tokens", "long_run", "chat"} & {*config.gates.required}


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [
        ({"source": "rehearsal"}, "'rehearsal', which needs checkpoint.rehearsal"),
        ({"rehearsal": {"config": "a", "seed": 1}}, "beside checkpoint.rehearsal; allowed: rehearsal"),
        ({"source": "rehearsal", "rehearsal": {"config": "a"}}, "checkpoint.rehearsal.seed: missing"),
        (
            {"source": "rehearsal", "rehearsal": {"config": "a", "seed": 1, "shards": 2}},
            "shards: unknown key",
        ),
    ],
)
def test_a_mistake_in_the_config_is_named(checkpoint, words):
    import yaml

    raw = yaml.safe_load(Path(ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    with pytest.raises(UserError) as refused:
        load_config(overlay(raw, {"checkpoint": checkpoint}))
    assert words in str(refused.value)


# --- through Snakemake -----------------------------------------------------------------------------------------------


def plan(*arguments):
    command = [sys.executable, "-m", "snakemake", "-n", "--nolock", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.end_to_end
def test_a_release_is_planned_from_the_weights_on():
    planned = plan("release", "--configfile", "config/rehearsal-e2b.yaml", "--config", "model=rehearsal-plan")
    assert planned.returncode == 0, planned.stdout + planned.stderr
    jobs = dict(re.findall(r"^(\w+) +(\d+)$", planned.stdout, flags=re.MULTILINE))
    assert jobs["rehearsal_checkpoint"] == jobs["checkpoint"] == jobs["assemble_release"] == "1"


@pytest.mark.end_to_end
def test_a_config_without_a_shape_is_told_what_to_use():
    refused = plan("rehearsal_checkpoint")
    assert refused.returncode != 0
    assert "use --configfile config/rehearsal-e2b.yaml" in refused.stdout + refused.stderr


def test_a_checkpoint_of_random_weights_says_so(tmp_path):
    """By that a release of them is kept from being published."""
    from workflow_scripts.checkpoint.fetch import fetch

    assert fetch("rehearsal", tmp_path, False).identity == {"kind": "rehearsal"}
    assert fetch("local", tmp_path, False).identity == {"kind": "local"}
