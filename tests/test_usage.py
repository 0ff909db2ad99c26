"""What jobs took is recorded beside their logs, and what results hold on the disk is counted once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import usage_inputs
from workflow_scripts import files, manifest
from workflow_scripts.errors import UserError
from workflow_scripts.store import blobs
from workflow_scripts.store.local import LocalStore
from workflow_scripts.usage import command, disk

LARGE = 20 << 20  # above the size from which files are linked


def run(folder, function, *arguments, store="off", artifact="data"):
    """A stage in a process of its own, as Snakemake starts it."""
    output = folder / "model/weights" / f"{artifact}{manifest.SUFFIX}"
    log = folder / f"model/logs/weights/{artifact}.log"
    call = [sys.executable, "-m", "tests.usage_inputs", function, "--output", str(output), "--log", str(log)]
    done = subprocess.run(
        [*call, *arguments],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"GEMMA4_STORE": str(store)},
        capture_output=True,
        text=True,
    )
    return done, log


def record_of(log):
    return json.loads(log.with_suffix(".usage.json").read_text())


@pytest.fixture(scope="module")
def allocated(tmp_path_factory):
    """A stage that took a known amount, its log, and its store."""
    folder = tmp_path_factory.mktemp("usage")
    with (folder / "mapped").open("wb") as stream:
        stream.truncate(usage_inputs.MAPPED)
    done, log = run(folder, "allocate", "--input", f"mapped={folder}/mapped", store=folder / "store")
    assert done.returncode == 0, done.stderr
    return folder, done, log


def test_anonymous_memory_is_what_a_job_allocates_and_no_page_of_a_file(allocated):
    record = record_of(allocated[2])
    interpreter = 30 << 20
    assert record["outcome"] == "built"
    assert record["anonymous"] == pytest.approx(usage_inputs.ANONYMOUS + interpreter / 2, rel=0.1)
    assert record["resident"] >= usage_inputs.ANONYMOUS + usage_inputs.MAPPED
    assert record["resident"] < usage_inputs.ANONYMOUS + usage_inputs.MAPPED + 3 * interpreter


def test_time_and_bytes_are_recorded(allocated):
    record = record_of(allocated[2])
    assert 0.5 < record["seconds"] < 60 and 0 < record["cpu_seconds"] < 60
    assert record["size"] == usage_inputs.WRITTEN
    if sys.platform.startswith("linux") and record["written"]:  # nothing is counted for memory file systems
        assert record["written"] == pytest.approx(
            2 * usage_inputs.WRITTEN, rel=0.1
        )  # the result, and the store's


def test_the_last_line_of_the_log_and_of_the_terminal_say_it(allocated):
    _, done, log = allocated
    peak = f"{round(record_of(log)['anonymous'] / 2**20)} MiB anonymous"
    assert peak in log.read_text().splitlines()[-1] and peak in done.stderr.splitlines()[-1]


def test_memory_of_children_counts(tmp_path):
    done, log = run(tmp_path, "start_child")
    assert done.returncode == 0, done.stderr
    both = usage_inputs.IN_CHILD + (40 << 20)
    assert usage_inputs.IN_CHILD < record_of(log)["anonymous"] < both


def test_a_failed_stage_is_recorded_as_failed(tmp_path):
    done, log = run(tmp_path, "fail")
    record = record_of(log)
    assert done.returncode == 1 and record["outcome"] == "failed" and record["key"] is None
    assert record["anonymous"] > usage_inputs.ANONYMOUS
    assert "failed after" in log.read_text().splitlines()[-1]


def test_the_sampler_of_a_killed_job_ends_in_silence():
    sampler = [sys.executable, "-m", "workflow_scripts.usage.sampler", str(os.getpid())]
    with subprocess.Popen(
        sampler, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as watching:
        watching.stdout.close()
        watching.stdin.close()
        assert watching.stderr.read() == b"" and watching.wait(timeout=10) == 0


def test_a_hit_of_the_store_leaves_the_record_of_the_build(allocated, capsys):
    folder, _, log = allocated
    before = log.with_suffix(".usage.json").read_bytes()
    for again in (folder, folder / "elsewhere"):
        done, other = run(again, "fail", "--input", f"mapped={folder}/mapped", store=folder / "store")
        assert done.returncode == 0 and "from the store" in done.stderr, done.stderr
    assert log.with_suffix(".usage.json").read_bytes() == before
    assert not other.with_suffix(".usage.json").exists()
    assert command.main([str(folder / "elsewhere/model")]) == 0
    assert (
        "no figures of 1, which came from the store or an older build: weights/data"
        in capsys.readouterr().out
    )


def test_the_report_names_every_job_and_the_largest(allocated, tmp_path, capsys):
    shutil.copytree(allocated[0] / "model", tmp_path / "model")
    assert run(tmp_path, "fail", artifact="broken")[0].returncode == 1
    assert command.main([str(tmp_path / "model"), "--by", "stage"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[1].split()[:3] == ["allocator", "broken", "(failed)"]
    assert lines[2].split()[:2] == ["allocator", "data"] and f"{usage_inputs.WRITTEN:,}" in lines[2]
    assert lines[3].startswith("all") and "2 jobs" in lines[3]
    assert "most resident memory: allocator data, " in said and "no figures of" not in said
    assert command.main([str(tmp_path / "model"), "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| STAGE | ARTIFACT | SECONDS |")


def test_a_record_of_another_build_tells_nothing(allocated, tmp_path, capsys):
    shutil.copytree(allocated[0] / "model", tmp_path / "model")
    path = tmp_path / "model/logs/weights/data.usage.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "0" * 64}))
    assert command.main([str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert "no figures of 1, which" in said and "allocator" not in said


def test_of_several_models_one_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="results holds no results of a model"):
        command.main([])
    for name in ("one", "two"):
        (tmp_path / "results" / name / "logs").mkdir(parents=True)
    with pytest.raises(UserError, match="results/one, results/two"):
        command.main([])


def result(folder, name, data, **difference):
    """A result with one file, put into no store."""
    tree = folder / name
    with files.new_tree(tree) as out:
        (out / "data.bin").write_bytes(data)
    made = manifest.Ingredients("weights", tree.name, {}, {"name": name} | difference, {}, {}, {})
    return tree, manifest.write_manifest(tree, made)


def counted(folder, store=None):
    return disk.measure(folder, dict(disk.manifests(folder)), store)


def test_a_hard_link_is_held_once_and_a_copy_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "clone_file", lambda source, target: False)
    data = os.urandom(LARGE)
    tree, _ = result(tmp_path, "weights/one", data)
    with files.new_tree(tmp_path / "release") as out:
        files.place_file(tree / "data.bin", out / "data.bin")
    manifest.write_manifest(
        tmp_path / "release", manifest.Ingredients("release", "release", {}, {}, {}, {}, {})
    )
    linked = counted(tmp_path)
    assert linked.together.size >= 2 * LARGE and linked.together.unique_size < 1.01 * LARGE
    assert linked.ratio == pytest.approx(1, abs=0.01) and linked.copies == []
    assert linked.parts[disk.RELEASE].held_size == pytest.approx(LARGE, rel=0.01)
    result(tmp_path, "weights/two", data)
    copied = counted(tmp_path)
    assert copied.ratio == pytest.approx(2, abs=0.01)
    assert [(copies.size, len(copies.paths)) for copies in copied.copies] == [(LARGE, 2)]


def test_leftovers_of_killed_runs_are_told_apart(tmp_path):
    (tmp_path / "weights/.tmp-one-abcdefgh/one").mkdir(parents=True)
    (tmp_path / "weights/.tmp-one-abcdefgh/one/data.bin").write_bytes(b"half")
    (tmp_path / "store/tmp").mkdir(parents=True)
    (tmp_path / "store/tmp/part").write_bytes(b"half")
    found = counted(tmp_path / "weights", tmp_path / "store")
    assert found.parts[disk.LEFT].files == 2 and found.together.files == 2


def test_equal_bytes_under_another_key_are_held_once(tmp_path, monkeypatch):
    """A comment in a stage's code gives it another key and the same bytes."""
    monkeypatch.setattr(blobs, "clone_file", lambda source, target: False)
    store, data = LocalStore(tmp_path / "store"), os.urandom(LARGE)
    for comment in ("old", "new"):
        tree, made = result(tmp_path / "results", "weights/one", data, comment=comment)
        stamps = manifest.stamp_files(tree)
        stamps |= store.put(made, tree, stamps)
        manifest.record_manifest(tree, made, stamps)
        assert (tree / "data.bin").read_bytes() == data
    found = counted(tmp_path / "results", store.root)
    assert found.copies == [] and found.ratio == pytest.approx(1, abs=0.01)
    monkeypatch.setattr(manifest, "sha256_file", lambda path: pytest.fail("hashed once more"))
    monkeypatch.setattr(blobs, "sha256_file", lambda path: pytest.fail("hashed once more"))
    manifest.verify_tree(manifest.manifest_path(tree))
    out = tmp_path / "out"
    out.mkdir()
    assert store.fetch(made.ingredients, out)


def test_a_damaged_blob_never_takes_the_place_of_a_right_file(tmp_path, monkeypatch):
    monkeypatch.setattr(blobs, "clone_file", lambda source, target: False)
    store, data = LocalStore(tmp_path / "store"), os.urandom(LARGE)
    tree, made = result(tmp_path / "results", "weights/one", data)
    store.put(made, tree, manifest.stamp_files(tree))
    blob = store.blobs.path(made.files[0].sha256)
    tree, made = result(tmp_path / "results", "weights/one", data, comment="new")
    blob.chmod(0o644)
    with blob.open("r+b") as stream:
        stream.write(b"damaged")
    blob.chmod(0o444)
    store.put(made, tree, manifest.stamp_files(tree))
    assert (tree / "data.bin").read_bytes() == data and blob.read_bytes() == data
