"""Stage `checkpoint`: every layout the world has gives the same digest, every damaged checkpoint is refused by name."""

import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import ml_dtypes
import numpy as np
import pytest

from tests import tiny
from workflow_scripts.checkpoint.fetch import fetch
from workflow_scripts.checkpoint.layout import expected_tensors
from workflow_scripts.checkpoint.needed import local_folder, local_inputs, needed_files
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import DTYPES
from workflow_scripts.checkpoint.text_config import FULL, SLIDING
from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_file
from workflow_scripts.stages import runner

ROOT = Path(__file__).parent.parent
EMBEDDED = ROOT / "resources" / "gemma-4-tiny"
REPOSITORY = "someone/gemma-4-tiny"
COMMIT = "3e22461f65e89153144f8adb70e3b8c2cc9845a7"
PREFIX = tiny.WRAPPER_PREFIX


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The reference: one file, wrapper prefix, pruned."""
    return tiny.build_tiny(tmp_path_factory.mktemp("plain"))


def refused(folder, tree, **params) -> str:
    """The message with which a folder is refused; nothing may have been placed."""
    with pytest.raises(UserError) as problem:
        tiny.build_tree(folder, tree, **params)
    assert not any(tree.iterdir())
    return str(problem.value)


def refused_tensors(tmp_path, edit, **options) -> str:
    """The message for a checkpoint whose published tensors were edited."""
    folder = tiny.write_checkpoint(tmp_path / "published", edit_tensors=edit, **options)
    return refused(folder, tmp_path / "tree")


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"unpruned": True},
        {"modalities": True},
        {"wrapper": False},
        {"wrapper": False, "unpruned": True, "modalities": True},
        {"shards": 3},
        {"shards": 2, "unpruned": True, "modalities": True},
        {"spelling": "5.24"},
        {"rope": "flat", "spelling": "5.24", "wrapper": False},
    ],
    ids=str,
)
def test_every_layout_of_the_same_weights_has_the_same_digest(tmp_path, plain, options):
    other = tiny.build_tiny(tmp_path, **options)
    assert other.digest == plain.digest
    assert other.config == plain.config
    assert other.names() == plain.names()
    assert all(np.array_equal(other.array(name), plain.array(name)) for name in plain.names())


def test_other_weights_config_or_dtype_have_another_digest(tmp_path, plain):
    def change_one_value(tensors):
        tensors[PREFIX + "layers.4.layer_scalar"][0] = 0.5

    def change_cap(config):
        config["text_config"]["final_logit_softcapping"] = 31.0

    digests = {
        plain.digest,
        tiny.build_tiny(tmp_path / "a", edit_tensors=change_one_value).digest,
        tiny.build_tiny(tmp_path / "b", edit_config=change_cap).digest,
        tiny.build_tiny(tmp_path / "c", dtype="F32").digest,
        tiny.build_tiny(tmp_path / "d", seed=5).digest,
    }
    assert len(digests) == 5


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_values_come_back_exactly(tmp_path, dtype):
    checkpoint = tiny.build_tiny(tmp_path, dtype=dtype)
    for name, expected in tiny.random_tensors(dtype=dtype).items():
        assert checkpoint.array(name).dtype == DTYPES[dtype]
        assert checkpoint.shape(name) == expected.shape
        assert np.array_equal(checkpoint.array(name), expected)
        assert np.array_equal(checkpoint.float32(name), expected.astype(np.float32))
    rows = checkpoint.float32("embed_tokens.weight", slice(3, 7))
    assert rows.dtype == np.float32 and rows.shape == (4, 96)
    ids = np.array([5, 1, 5])
    assert np.array_equal(
        checkpoint.float32("embed_tokens.weight", ids), checkpoint.float32("embed_tokens.weight")[ids]
    )
    assert checkpoint.names() == sorted(expected_tensors(checkpoint.config))


def test_per_layer_table_in_three_dimensions(tmp_path, plain):
    def split(tensors):
        name = PREFIX + "embed_tokens_per_layer.weight"
        tensors[name] = tensors[name].reshape(128, 10, 32)

    other = tiny.build_tiny(tmp_path, edit_tensors=split)
    assert other.shape("embed_tokens_per_layer.weight") == (128, 320)
    assert other.digest == plain.digest


def test_identical_head_is_accepted_and_another_one_refused(tmp_path, plain):
    def same(tensors):
        tensors["lm_head.weight"] = tensors[PREFIX + "embed_tokens.weight"]

    def other(tensors):
        tensors["lm_head.weight"] = tensors[PREFIX + "embed_tokens.weight"].copy()
        tensors["lm_head.weight"][7, 7] += 1

    accepted = tiny.build_tiny(tmp_path / "a", edit_tensors=same)
    assert accepted.digest == plain.digest and "lm_head.weight" not in accepted.names()
    message = refused_tensors(tmp_path / "b", other)
    assert "lm_head.weight differs from embed_tokens.weight" in message and "tie_word_embeddings" in message


def test_line_endings_and_byte_order_mark_of_config_do_not_matter(tmp_path, plain):
    folder = tiny.write_checkpoint(tmp_path / "published")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert tiny.build_tree(folder, tmp_path / "tree").digest == plain.digest


def test_the_result_holds_the_files_that_count(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "mit Leerzeichen ü 模型" / "published")
    for name in ("chat_template.jinja", "README.md", "LICENSE", "tokenizer.model", "special_tokens_map.json"):
        (folder / name).write_bytes(b"x\r\n")
    for name in ("pytorch_model.bin", "optimizer.pt", "model-extra.safetensors", ".gitattributes"):
        (folder / name).write_bytes(b"y")
    (folder / "README.d").mkdir()
    checkpoint = tiny.build_tree(folder, tmp_path / "ergebnis ü" / "tree")
    placed = {path.name for path in checkpoint.source.iterdir()}
    assert placed == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
        "chat_template.jinja", "README.md", "LICENSE", "tokenizer.model", "special_tokens_map.json",
    }  # fmt: skip
    record = json.loads((checkpoint.source.parent / "checkpoint.json").read_text())
    assert record["files"].keys() == placed
    for path in checkpoint.source.iterdir():
        assert not path.is_symlink()
        assert path.read_bytes() == (folder / path.name).read_bytes()
        assert record["files"][path.name] == {"size": path.stat().st_size, "sha256": sha256_file(path)}


def test_the_record_has_nothing_of_the_host(tmp_path):
    records = []
    for place in ("a", "b"):
        tiny.build_tiny(tmp_path / place)
        records.append((tmp_path / place / "checkpoint" / "checkpoint.json").read_bytes())
    assert records[0] == records[1]
    assert str(tmp_path).encode() not in records[0]
    assert json.loads(records[0])["origin"] == {"kind": "local"}


def test_tokenizer_model_is_not_needed(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    (folder / "tokenizer.model").unlink(missing_ok=True)
    assert "tokenizer.model" not in {
        path.name for path in tiny.build_tree(folder, tmp_path / "tree").source.iterdir()
    }


def test_opening_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"no checkpoint\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "checkpoint.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="format 99"):
        Checkpoint.open(tmp_path)


# --- which files count -----------------------------------------------------------------------------------------------


def test_stray_single_file_beside_shards_is_ignored(tmp_path, plain):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    stray = {
        name: np.zeros((2, 2), np.uint8) for name in (PREFIX + "norm.weight", PREFIX + "embed_tokens.weight")
    }
    tiny.write_tensors(folder / "model.safetensors", stray)
    checkpoint = tiny.build_tree(folder, tmp_path / "tree")
    assert checkpoint.digest == plain.digest
    assert not (
        checkpoint.source / "model.safetensors"
    ).exists()  # transformers would prefer it to the shards
    assert (checkpoint.source / "model.safetensors.index.json").is_file()


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = refused(folder, tmp_path / "tree")
    assert "1 of the 2 shards" in message and "model-00002-of-00002.safetensors" in message


def test_an_index_without_any_shard(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    for shard in folder.glob("model-*"):
        shard.unlink()
    assert "2 of the 2 shards" in refused(folder, tmp_path / "tree")
    tiny.write_tensors(folder / "model.safetensors", {})
    assert "delete model.safetensors.index.json" in refused(folder, tmp_path / "tree2")


def test_shards_without_an_index(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert "but no model.safetensors.index.json" in refused(folder, tmp_path / "tree")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    folder = tiny.write_checkpoint(tmp_path / "published")
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        needed_files(folder)


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_tensor_that_the_index_promises_but_no_shard_holds(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    edit_index(
        folder, lambda places: places.update({PREFIX + "norm.extra": "model-00001-of-00002.safetensors"})
    )
    message = refused(folder, tmp_path / "tree")
    assert "lacks 1 tensors" in message and PREFIX + "norm.extra" in message and "model-00001" in message


def test_a_tensor_that_the_index_does_not_know(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    edit_index(folder, lambda places: places.pop(PREFIX + "norm.weight"))
    message = refused(folder, tmp_path / "tree")
    assert "does not place there" in message and PREFIX + "norm.weight" in message


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/hostname", 3])
def test_an_index_that_leaves_the_folder(tmp_path, shard):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    edit_index(folder, lambda places: places.update({PREFIX + "norm.weight": shard}))
    assert "which is no file name" in refused(folder, tmp_path / "tree")


def test_a_truncated_shard_is_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 100)
    message = refused(folder, tmp_path / "tree")
    assert f"{shard} is truncated" in message


def test_garbage_in_a_header_or_a_config_is_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8:12] = b"\xff\xfe\xfd\xfc"
    (folder / "model.safetensors").write_bytes(data)
    assert f"{folder / 'model.safetensors'} is not a safetensors file" in refused(folder, tmp_path / "tree")
    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json is not readable JSON" in refused(folder, tmp_path / "tree2")


def test_dangling_links_are_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/gone")
    assert "symlink to a file that is not there" in refused(folder, tmp_path / "tree")


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "chat_template.jinja",
        "LICENSE",
        "tokenizer.json",
        "model.safetensors.index.json",
    ],
)
def test_a_dangling_link_of_any_file_that_counts_is_named(tmp_path, name):
    """Also of those that a checkpoint may lack: here it has them, but not whole."""
    folder = tiny.write_checkpoint(tmp_path / "published")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("gone")
    with pytest.raises(UserError, match=f"{name} is a symlink to a file that is not there"):
        local_inputs(folder)


def test_no_folder_at_all(tmp_path):
    with pytest.raises(UserError, match=r"folder .*none does not exist: correct checkpoint\.source"):
        local_inputs(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file is no folder: correct checkpoint\.source"):
        local_inputs(tmp_path / "file")


# --- what a local checkpoint is known by -----------------------------------------------------------------------------


def execute(folder, home):
    """The stage as the rule calls it; the result's key and the manifest's bytes."""
    output = home / "text.manifest.json"
    params = {"source": "local", "num_hidden_layers": 10}
    outcome = runner.execute("checkpoint", local_inputs(folder), params, output)
    return outcome.manifest.ingredients.key, output.read_bytes()


def test_only_the_needed_files_and_no_path_go_into_the_key(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    (folder / "LICENSE").write_text("mine")
    first, written = execute(folder, tmp_path / "a")
    for name in (
        ".git/HEAD",
        "optimizer.pt",
        "runs/events.log",
        "trainer_state.json",
        "global_step9/model.safetensors",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    assert execute(folder, tmp_path / "b") == (first, written)
    moved = folder.rename(tmp_path / "elsewhere")
    assert execute(moved, tmp_path / "c") == (first, written)
    assert str(tmp_path).encode() not in written
    (moved / "LICENSE").write_text("yours")
    assert execute(moved, tmp_path / "d")[0] != first


def test_inputs_name_each_file(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published", shards=2)
    inputs = local_inputs(folder)
    assert inputs.keys() == {f"source/{path.name}" for path in needed_files(folder)}
    assert "source/model-00002-of-00002.safetensors" in inputs
    assert local_folder(inputs) == local_folder({"source": folder}) == folder
    assert local_folder({}) is None


def test_files_that_came_or_went_since_the_plan_are_named(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    inputs = local_inputs(folder)
    (folder / "NOTICE").write_text("")
    with pytest.raises(
        UserError, match=r"changed after the run was planned \(NOTICE came or went\): run again"
    ):
        local_folder(inputs)
    with pytest.raises(UserError, match="lies in one folder"):
        local_folder(inputs | {"source/x": tmp_path / "other" / "x"})


def test_planning_needs_no_numpy():
    program = (
        "import sys; from workflow_scripts.checkpoint import needed; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"numpy", "torch", "ml_dtypes", "yaml", "huggingface_hub"} & set(done.stdout.split())


def test_messages_name_the_folder(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "my tune")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["head_dim"]
    tiny.write_text(folder / "config.json", config)
    with pytest.raises(UserError, match=r"my tune/config\.json"):
        execute(folder, tmp_path / "a")


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_missing_tensors_are_listed_up_to_ten_with_their_number(tmp_path):
    def drop(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            del tensors[name]

    message = refused_tensors(tmp_path, drop)
    assert "60 tensors are missing: layers.0.mlp.down_proj.weight" in message and "and 50 more" in message
    assert message.count("_proj.weight") == 10


def test_keys_that_only_shared_layers_may_lack(tmp_path):
    def drop(tensors):
        del tensors[PREFIX + "layers.4.self_attn.v_proj.weight"]

    assert "1 tensors are missing: layers.4.self_attn.v_proj.weight" in refused_tensors(tmp_path, drop)


def test_two_shared_layers(tmp_path):
    """The QAT releases lack the dead keys, the base releases carry them."""
    dims = tiny.Dims(num_kv_shared_layers=2, layer_types=(SLIDING, FULL, SLIDING, FULL))
    pruned = tiny.build_tiny(tmp_path / "a", dims)
    assert "layers.2.self_attn.k_proj.weight" not in pruned.names()
    assert tiny.build_tiny(tmp_path / "b", dims, unpruned=True).digest == pruned.digest


def test_wrong_shapes_are_listed(tmp_path):
    def transpose(tensors):
        for layer in (0, 1):
            name = f"{PREFIX}layers.{layer}.mlp.gate_proj.weight"
            tensors[name] = np.ascontiguousarray(tensors[name].T)

    message = refused_tensors(tmp_path, transpose)
    assert "2 tensors have a wrong shape" in message
    assert "layers.1.mlp.gate_proj.weight [96, 64] instead of [64, 96]" in message


@pytest.mark.parametrize("name", ["embed_tokens.weight", "embed_tokens_per_layer.weight"])
@pytest.mark.parametrize(
    ("rows", "advice"), [(192, "set vocab_size to 192"), (64, "fetch the checkpoint again")]
)
def test_rows_that_differ_from_vocab_size(tmp_path, name, rows, advice):
    def resize(tensors):
        tensors[PREFIX + name] = np.resize(tensors[PREFIX + name], (rows, tensors[PREFIX + name].shape[1]))

    message = refused_tensors(tmp_path, resize)
    assert f"{name} has {rows} rows but vocab_size is 128" in message and advice in message


@pytest.mark.parametrize(
    "name",
    ["layers.0.self_attn.q_proj.bias", "layers.0.router.proj.weight", "layers.10.layer_scalar",
     "layers.3.self_attn.v_norm.weight", "layers.9.self_attn.k_proj.bias"],
)  # fmt: skip
def test_unknown_text_tensors_are_named(tmp_path, name):
    def add(tensors):
        tensors[PREFIX + name] = np.ones(32, ml_dtypes.bfloat16)

    assert f"1 tensors are unknown: {PREFIX}{name}" in refused_tensors(tmp_path, add)


def test_two_text_models_in_one_checkpoint(tmp_path):
    def double(tensors):
        tensors["model.layers.0.layer_scalar"] = tensors[PREFIX + "layers.0.layer_scalar"]

    assert "unknown: model.layers.0.layer_scalar" in refused_tensors(tmp_path, double)


def test_another_prefix_is_told_what_is_supported(tmp_path):
    def rename(tensors):
        for name in list(tensors):
            tensors[name.replace(PREFIX, "transformer.")] = tensors.pop(name)

    message = refused_tensors(tmp_path, rename)
    assert "model.language_model.layers.*" in message and "transformer.embed_tokens.weight" in message


def test_quantized_storage_is_refused(tmp_path):
    def quantize(tensors):
        name = PREFIX + "layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].astype(np.int8)

    assert "layers.0.mlp.up_proj.weight I8" in refused_tensors(tmp_path, quantize)


BAD = [
    ("BF16", float("nan"), "not a finite number"),
    ("BF16", float("inf"), "not a finite number"),
    ("BF16", -float("inf"), "not a finite number"),
    ("BF16", 1e38, "overflows fp16"),
    ("BF16", -65536.0, "overflows fp16"),
    ("F16", float("nan"), "not a finite number"),
    ("F16", -float("inf"), "not a finite number"),
    ("F32", float("nan"), "not a finite number"),
    ("F32", float("inf"), "not a finite number"),
    ("F32", 65505.0, "overflows fp16"),
    ("F32", -3e38, "overflows fp16"),
]


@pytest.mark.parametrize(("dtype", "value", "reason"), BAD)
@pytest.mark.parametrize("name", ["layers.7.mlp.down_proj.weight", "embed_tokens_per_layer.weight"])
def test_values_that_fp16_cannot_hold_are_named(tmp_path, dtype, value, reason, name):
    def spoil(tensors):
        tensors[PREFIX + name][5, 17] = value

    message = refused_tensors(tmp_path, spoil, dtype=dtype)
    assert f"tensor {name} is" in message and "at [5, 17]" in message and reason in message


@pytest.mark.parametrize(("dtype", "largest"), [("BF16", 65280.0), ("F16", 65504.0), ("F32", 65504.0)])
def test_the_largest_values_that_fp16_holds_are_fine(tmp_path, dtype, largest):
    def stretch(tensors):
        tensors[PREFIX + "norm.weight"][:2] = [largest, -largest]

    assert tiny.build_tiny(tmp_path, dtype=dtype, edit_tensors=stretch).float32("norm.weight")[1] == -largest


def test_bad_values_where_nobody_reads_them_do_not_matter(tmp_path, plain):
    def spoil(tensors):
        tensors[PREFIX + "layers.9.self_attn.k_proj.weight"][:] = np.nan

    checkpoint = tiny.build_tiny(tmp_path, unpruned=True, modalities=True, edit_tensors=spoil)
    assert checkpoint.digest == plain.digest


def test_bad_values_are_found_in_every_block(tmp_path, monkeypatch):
    from workflow_scripts.checkpoint import validate

    monkeypatch.setattr(validate, "_BLOCK_BYTES", 100)

    def spoil(tensors):
        tensors[PREFIX + "embed_tokens.weight"][-1, -1] = np.inf

    assert "at [127, 95]" in refused_tensors(tmp_path, spoil)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_anonymous_memory_stays_small(tmp_path):
    """A 300 MB checkpoint is checked within a few blocks of memory beside the mapped file."""
    dims = tiny.Dims(vocab_size=1 << 18)
    folder = tiny.write_checkpoint(tmp_path / "published", tiny.Dims(vocab_size=128))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"vocab_size": dims.vocab_size, "vocab_size_per_layer_input": dims.vocab_size}
    tiny.write_text(folder / "config.json", config)
    write_sparse(folder / "model.safetensors", dims)
    program = f"""
import re, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests import tiny
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
from workflow_scripts.checkpoint import validate
peak, before, check = 0, anonymous(), validate._magnitudes
def measured(codes):
    global peak
    result = check(codes)
    peak = max(peak, anonymous())
    return result
validate._magnitudes = measured
tiny.build_tree(Path({str(folder)!r}), Path({str(tmp_path / "tree")!r}))
print((peak - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


def write_sparse(path, dims):
    """A checkpoint of zeros with big tables, written as holes."""
    layout, offset = {}, 0
    for name, shape in expected_tensors(tiny.canonical_config(dims)).items():
        end = offset + 2 * int(np.prod(shape))
        layout[PREFIX + name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(layout).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + offset)


# --- parameters ------------------------------------------------------------------------------------------------------


def test_pinned_hashes(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    right = {name: sha256_file(folder / name) for name in ("config.json", "model.safetensors")}
    tiny.build_tree(folder, tmp_path / "a", sha256=right)
    tiny.build_tree(folder, tmp_path / "b", sha256={name: pin.upper() for name, pin in right.items()})
    message = refused(folder, tmp_path / "c", sha256=right | {"model.safetensors": "0" * 64})
    assert "model.safetensors has sha256" in message and right["model.safetensors"] in message
    assert "pins model.bin" in refused(folder, tmp_path / "d", sha256={"model.bin": "0" * 64})


def test_number_of_layers_must_be_the_config_s(tmp_path):
    folder = tiny.write_checkpoint(tmp_path / "published")
    message = refused(folder, tmp_path / "tree", num_hidden_layers=35)
    assert "num_hidden_layers is 35" in message and "10 layers" in message


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (f"hf://{REPOSITORY}", "40-digit commit"),
        ("hf://@main", "hf://owner/name@"),
        (f"hf://gemma@{COMMIT}", "hf://owner/name@"),
        (f"hf://{REPOSITORY}@main", "allow_moving_revision"),
        (f"hf://{REPOSITORY}@{COMMIT[:12]}", "allow_moving_revision"),
        (f"hf://{REPOSITORY}@{COMMIT.upper()}", "lower-case"),
        ("local", "local is no hf:// address, and no folder"),
        ("https://huggingface.co/google/gemma", "no hf:// address"),
    ],
)
def test_wrong_sources_say_what_is_right(source, word):
    with pytest.raises(UserError, match=word):
        fetch(source, None, allow_moving_revision=False)


# --- the Hub's cache, offline ----------------------------------------------------------------------------------------


def fill_cache(cache: Path, published: Path, commit: str = COMMIT, branch: str | None = None) -> Path:
    """The Hub client's cache layout: blobs by hash, a snapshot of relative symlinks, refs."""
    home = cache / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    (home / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in published.iterdir():
        blob = sha256_file(path)
        shutil.copyfile(path, home / "blobs" / blob)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", blob))
    if branch:
        (home / "refs").mkdir()
        (home / "refs" / branch).write_text(commit)
    return snapshot


def run_stage(
    folder: Path, source: str, environment: dict[str, str], **params
) -> subprocess.CompletedProcess:
    """The command line, as a rule calls it, from inside `folder`."""
    command = [
        sys.executable,
        "-m",
        "workflow_scripts",
        "stage",
        "checkpoint",
        "--output",
        "out/tiny.manifest.json",
    ]
    command += [
        "--params",
        json.dumps({"source": source, "num_hidden_layers": 10, **params}),
        "--log",
        "log.txt",
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        command,
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
    )


def test_offline_with_a_relative_cache(tmp_path, plain):
    """No token, no network, a cache named relative to the working folder: the complete local snapshot is enough."""
    fill_cache(tmp_path / "my cache", tiny.write_checkpoint(tmp_path / "published"), branch="main")
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "my cache", "HF_TOKEN": "hf_secretsecret"}
    done = run_stage(tmp_path, f"hf://{REPOSITORY}@{COMMIT}", environment)
    assert done.returncode == 0, done.stderr
    tree = tmp_path / "out" / "tiny"
    checkpoint = Checkpoint.open(tree)
    assert checkpoint.digest == plain.digest
    assert all(path.is_file() and not path.is_symlink() for path in checkpoint.source.iterdir())
    origin = json.loads((tree / "checkpoint.json").read_text())["origin"]
    assert origin == {"kind": "huggingface", "repository": REPOSITORY, "commit": COMMIT}
    assert "hf_secret" not in (tmp_path / "log.txt").read_text() + done.stdout + done.stderr


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty Hub cache; offline unless a test says otherwise."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    return tmp_path / "hub"


def test_offline_branch_is_recorded_as_its_commit(tmp_path, hub_cache):
    fill_cache(hub_cache, tiny.write_checkpoint(tmp_path / "published"), branch="main")
    fetched = fetch(f"hf://{REPOSITORY}@main", None, allow_moving_revision=True)
    assert fetched.identity["commit"] == COMMIT
    assert fetched.folder.is_absolute() and (fetched.folder / "config.json").is_file()


def test_offline_without_a_complete_copy_says_so(tmp_path, hub_cache):
    address = f"hf://{REPOSITORY}@{COMMIT}"
    with pytest.raises(UserError, match=r"not there, .*HF_HUB_OFFLINE unset"):
        fetch(address, None, allow_moving_revision=False)
    snapshot = fill_cache(hub_cache, tiny.write_checkpoint(tmp_path / "published"))
    blob = (snapshot / "tokenizer.json").resolve()
    blob.unlink()
    with pytest.raises(UserError, match=r"lacks tokenizer\.json.*HF_HUB_OFFLINE unset"):
        fetch(address, None, allow_moving_revision=False)
    with pytest.raises(UserError, match="not there"):
        fetch(f"hf://{REPOSITORY}@{'0' * 40}", None, allow_moving_revision=False)


# --- the Hub itself: its real client against a small local server ----------------------------------------------------


def use_endpoint(monkeypatch, port):
    """Send the Hub client to a local port, as HF_ENDPOINT does, and let it retry without waiting."""
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


@contextmanager
def hub(monkeypatch, published: Path | None, status: int = 200, code: str = ""):
    """Serve one repository at one commit, or answer every request with an error; yields the requested paths."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            parts = self.path.partition("?")[0].split("/")
            if status != 200:
                return self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "no"})
            if "/tree/" in self.path:
                files = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": sha256_file(p)[:40]}
                         for p in sorted(published.iterdir())]  # fmt: skip
                return self.reply(200, json.dumps(files).encode(), {"Content-Type": "application/json"})
            if "/revision/" in self.path:
                info = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": COMMIT, "siblings": []}
                return self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            path = published / parts[-1]
            return self.reply(
                200, path.read_bytes(), {"ETag": f'"{sha256_file(path)}"', "X-Repo-Commit": COMMIT}
            )

        do_HEAD = do_GET

        def reply(self, number, body, headers):
            self.send_response(number)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    use_endpoint(monkeypatch, server.server_port)
    try:
        yield requested
    finally:
        server.shutdown()
        server.server_close()


def test_only_the_needed_files_are_downloaded(tmp_path, hub_cache, monkeypatch):
    published = tiny.write_checkpoint(tmp_path / "published")
    (published / "pytorch_model.bin").write_bytes(b"x")
    (published / "chat_template.jinja").write_text("{{ bos_token }}")
    with hub(monkeypatch, published) as requested:
        fetched = fetch(f"hf://{REPOSITORY}@main", None, allow_moving_revision=True)
    assert fetched.identity["commit"] == COMMIT
    names = {path.name for path in fetched.folder.iterdir()}
    assert names == {path.name for path in published.iterdir()} - {"pytorch_model.bin"}
    assert not any("pytorch_model" in path for path in requested)
    with hub(monkeypatch, published, status=500) as requested:  # a pinned commit that is here needs no Hub
        again = fetch(f"hf://{REPOSITORY}@{COMMIT}", None, allow_moving_revision=False)
    assert again == fetched and not requested


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "GatedRepo", "gated repository.*accept the licence.*hf auth login"),
        (403, "GatedRepo", "gated repository.*accept the licence.*hf auth login"),
        (401, "", "access is refused.*hf auth login"),
        (403, "", "access is refused.*hf auth login"),
        (401, "RepoNotFound", "no such repository.*hf auth login"),
        (404, "RepoNotFound", "no such repository"),
        (404, "RevisionNotFound", "no such revision"),
        (503, "", "HTTP 503: run again"),
    ],
)
def test_refusals_of_the_hub_say_what_to_do(hub_cache, monkeypatch, status, code, words):
    with hub(monkeypatch, None, status, code), pytest.raises(UserError, match=words) as problem:
        fetch(f"hf://{REPOSITORY}@{COMMIT}", None, allow_moving_revision=False)
    assert f"{REPOSITORY}@{COMMIT}" in str(problem.value)
    assert "127.0.0.1" not in str(problem.value)


def test_a_gated_repository_that_is_cached_needs_no_token(tmp_path, hub_cache, monkeypatch, plain):
    published = tiny.write_checkpoint(tmp_path / "published")
    fill_cache(hub_cache, published)
    with hub(monkeypatch, None, 401, "GatedRepo"):
        fetched = fetch(f"hf://{REPOSITORY}@{COMMIT}", None, allow_moving_revision=False)
    assert tiny.build_tree(fetched.folder, tmp_path / "tree").digest == plain.digest


def test_no_server_at_all(hub_cache, monkeypatch):
    use_endpoint(monkeypatch, 9)  # the discard port: nobody listens
    with pytest.raises(UserError, match=r"the network failed \(ConnectError\)"):
        fetch(f"hf://{REPOSITORY}@{COMMIT}", None, allow_moving_revision=False)


# --- the embedded checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="the embedded checkpoint is not built")
def test_the_embedded_checkpoint_through_the_command_line(tmp_path):
    outputs = []
    for place in ("a", "b"):
        output = tmp_path / place / "tiny.manifest.json"
        done = subprocess.run(
            [sys.executable, "-m", "workflow_scripts", "stage", "checkpoint", "--input", f"source={EMBEDDED}",
             "--params", json.dumps({"source": "resources/gemma-4-tiny", "num_hidden_layers": 10}),
             "--output", str(output), "--log", str(tmp_path / "log.txt")],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        outputs.append(output.read_bytes())
    assert outputs[0] == outputs[1]
    checkpoint = Checkpoint.open(tmp_path / "a" / "tiny")
    assert checkpoint.config.num_hidden_layers == 10
    assert "validate 1/160 embed_tokens.weight" in (tmp_path / "log.txt").read_text()
