"""Atomic files and manifests: nothing half-written looks whole, nothing altered is read."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_scripts import files, manifest
from workflow_scripts.errors import UserError

INGREDIENTS = manifest.Ingredients(
    "stage", "artifact", {"a.py": "0"}, {"a": 1}, {"in": "digest"}, {"numpy": "2.4.6"}, {"python": "3.11"}
)


def make_result(folder, content):
    tree = folder / "thing"
    with files.new_tree(tree) as out:
        for name, data in content.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
    return manifest.manifest_path(tree), manifest.write_manifest(tree, INGREDIENTS)


def test_a_result_is_read_back_as_written(tmp_path):
    path, written = make_result(tmp_path, {"a": b"1", "sub/b": b"22"})
    assert manifest.verify_tree(path) == written
    assert [(entry.path, entry.size) for entry in written.files] == [("a", 1), ("sub/b", 2)]
    assert json.loads(path.read_text())["digest"] == written.digest


@pytest.mark.parametrize("keep_time", [False, True])
def test_an_altered_byte_is_found_and_named(tmp_path, keep_time):
    """Also where size and mtime are put back: the change time tells."""
    path, _ = make_result(tmp_path, {"a": b"1", "b": b"222"})
    file = manifest.tree_path(path) / "b"
    before = file.stat()
    time.sleep(0.01)
    with file.open("r+b") as stream:
        stream.write(b"X")
    if keep_time:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(UserError, match=r"thing/b .*bytes changed"):
        manifest.verify_tree(path)


def test_missing_and_stray_files_are_found_and_named(tmp_path):
    path, _ = make_result(tmp_path, {"a": b"1", "b": b"2"})
    (manifest.tree_path(path) / "c").write_text("stray")
    with pytest.raises(UserError, match="thing/c is not part"):
        manifest.verify_tree(path)
    (manifest.tree_path(path) / "c").unlink()
    (manifest.tree_path(path) / "a").unlink()
    with pytest.raises(UserError, match="thing/a is missing"):
        manifest.verify_tree(path)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", None])
def test_an_unreadable_manifest_is_no_traceback(tmp_path, damage):
    path, _ = make_result(tmp_path, {"a": b"1"})
    if damage is None:
        path.write_text(path.read_text().replace('"stage": "stage"', '"stage": "other"'))
    else:
        path.write_text(damage)
    with pytest.raises(UserError, match="delete it and run again"):
        manifest.verify_tree(path)


def test_a_touched_file_is_hashed_again_and_accepted(tmp_path):
    path, written = make_result(tmp_path, {"a": b"1"})
    os.utime(manifest.tree_path(path) / "a")
    assert manifest.verify_tree(path) == written


def test_an_unchanged_file_is_not_hashed_again(tmp_path, monkeypatch):
    path, written = make_result(tmp_path, {"a": b"1"})
    monkeypatch.setattr(manifest, "sha256_file", lambda path: pytest.fail(f"hashed {path}"))
    assert manifest.verify_tree(path) == written


def test_figures_of_the_host_are_checked_but_not_in_the_digest(tmp_path):
    _path, first = make_result(tmp_path / "1", {"a": b"1", "measured.json": b"0.1"})
    other, second = make_result(tmp_path / "2", {"a": b"1", "measured.json": b"0.2"})
    assert first.digest == second.digest
    (manifest.tree_path(other) / "measured.json").write_bytes(b"0.3")
    with pytest.raises(UserError, match=r"measured\.json"):
        manifest.verify_tree(other)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=9), min_size=1, max_size=4))
@settings(max_examples=40)
def test_the_digest_depends_on_names_and_bytes_only(tmp_path_factory, content):
    entries = [
        manifest.FileEntry(n, len(d), files.hashlib.sha256(d).hexdigest()) for n, d in sorted(content.items())
    ]
    digest = manifest.Manifest(INGREDIENTS, entries).digest
    _path, written = make_result(tmp_path_factory.mktemp("m"), content)
    assert written.digest == digest
    name = sorted(content)[0]
    _, changed = make_result(tmp_path_factory.mktemp("m"), content | {name: content[name] + b"!"})
    assert changed.digest != digest


@given(st.sampled_from(sorted(manifest.Ingredients.__dataclass_fields__)))
def test_every_ingredient_changes_the_key(field):
    value = getattr(INGREDIENTS, field)
    other = value | {"new": "x"} if isinstance(value, dict) else value + "x"
    assert manifest.Ingredients(**{**INGREDIENTS.__dict__, field: other}).key != INGREDIENTS.key


def test_a_failed_build_leaves_the_old_result(tmp_path):
    path, written = make_result(tmp_path, {"a": b"old"})
    with pytest.raises(RuntimeError), files.new_tree(manifest.tree_path(path)) as out:
        (out / "a").write_bytes(b"half")
        raise RuntimeError
    assert manifest.verify_tree(path) == written
    assert sorted(p.name for p in tmp_path.iterdir()) == [".thing.stamp.json", "thing", "thing.manifest.json"]


def test_a_killed_build_leaves_nothing_that_looks_whole(tmp_path):
    script = (
        "import sys, pathlib, time\nfrom workflow_scripts.files import new_tree\n"
        "with new_tree(pathlib.Path(sys.argv[1]) / 'thing') as out:\n"
        "    (out / 'a').write_text('half'); print('ready', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        child.kill()
    assert not (tmp_path / "thing").exists()
    assert not manifest.manifest_path(tmp_path / "thing").exists()
    _, written = make_result(tmp_path, {"a": b"1"})
    assert [entry.path for entry in written.files] == ["a"]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path, umask):
    old = os.umask(umask)
    try:
        path, _ = make_result(tmp_path, {"sub/a": b"1"})
    finally:
        os.umask(old)
    tree = manifest.tree_path(path)
    modes = [oct(p.stat().st_mode & 0o777) for p in (tree, tree / "sub", tree / "sub/a", path)]
    assert modes == ["0o755", "0o755", "0o644", "0o644"]


def test_a_symlink_is_placed_as_the_file_it_names(tmp_path):
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    files.place_file(tmp_path / "link", tmp_path / "placed")
    assert not (tmp_path / "placed").is_symlink()
    assert (tmp_path / "placed").read_text() == "x"


@pytest.mark.parametrize(("name", "same"), [("measured.json", True), ("measured.npz", False)])
def test_arrays_of_the_host_are_known_by_how_they_were_made(tmp_path, name, same):
    """Evidence made by other code must be judged again, though its digest cannot tell; mere figures need not."""
    path, written = make_result(tmp_path, {"reference.json": b"{}", name: b"1"})
    other = replace(written, ingredients=replace(INGREDIENTS, code={"a.py": "1"}))
    elsewhere = replace(written, ingredients=replace(INGREDIENTS, host={"python": "3.13"}))
    assert other.digest == written.digest == elsewhere.digest
    assert (other.identity == written.identity) is same
    assert elsewhere.identity == written.identity
    assert manifest.read_manifest(path).identity == written.identity


def test_an_older_manifest_over_a_newer_result_is_found_out(tmp_path):
    """The stamps say that the files are untouched, but not that they are what this manifest lists."""
    path, _ = make_result(tmp_path, {"a": b"old"})
    older = path.read_text()
    make_result(tmp_path, {"a": b"new"})
    path.write_text(older)
    with pytest.raises(UserError, match=r"thing/a .*bytes changed"):
        manifest.verify_tree(path)


def test_leftovers_of_killed_runs_go_and_those_of_others_stay(tmp_path):
    gone, kept = tmp_path / ".tmp-thing-abcd_123", tmp_path / ".tmp-thing-b-abcd_123"
    for folder in (gone, kept):
        (folder / "thing").mkdir(parents=True)
    files.remove_stale_siblings(tmp_path / "thing")
    assert not gone.exists() and kept.exists()
    with files.new_tree(tmp_path / "thing"):
        (current,) = tmp_path.glob(".tmp-thing-????????")
        assert current.is_dir()  # the form of the names is what the clean-up looks for


def test_an_edit_of_a_placed_small_file_stays_where_it_is_made(tmp_path):
    source = tmp_path / "source"
    source.write_text("as published")
    source.chmod(0o755)
    files.place_file(source, tmp_path / "placed")
    (tmp_path / "placed").write_text("edited")
    assert source.read_text() == "as published"
    assert not files.is_executable(tmp_path / "placed")  # modes of a user's files are no part of a result


def test_a_placed_tree_keeps_its_executables(tmp_path):
    (tmp_path / "tree").mkdir()
    for name, mode in (("run.sh", 0o755), ("data", 0o644)):
        (tmp_path / "tree" / name).write_text("x")
        (tmp_path / "tree" / name).chmod(mode)
    files.place_tree(tmp_path / "tree", tmp_path / "copy")
    assert [files.is_executable(tmp_path / "copy" / name) for name in ("run.sh", "data")] == [True, False]


def test_a_result_that_is_not_whole_is_forgotten_and_a_whole_one_is_not(tmp_path):
    """Snakemake sees manifests only; a deleted, cut or altered result must not count as up to date."""
    paths = {
        name: make_result(tmp_path / name, {"a": b"1", "b": b"22"})[0]
        for name in ("whole", "gone", "cut", "odd")
    }
    shutil.rmtree(manifest.tree_path(paths["gone"]))
    (manifest.tree_path(paths["cut"]) / "b").write_bytes(b"2")
    (manifest.tree_path(paths["odd"]) / "b").write_bytes(b"XX")
    os.utime(manifest.tree_path(paths["whole"]) / "a")
    wrong = manifest.forget_damaged(tmp_path)
    assert len(wrong) == 3
    assert {name for name, path in paths.items() if path.exists()} == {"whole"}
