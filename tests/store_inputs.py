"""Results to store, and what tests of the store do with them."""

import shutil

import pytest

from workflow_scripts import files, manifest

INGREDIENTS = manifest.Ingredients(
    "weights", "fp16", {"a.py": "0"}, {"recipe": "fp16"}, {"in": "digest"}, {"numpy": "2"}, {"python": "3.11"}
)
CONTENT = {"a.bin": b"one", "sub/b.bin": b"two" * 100, "measured.json": b"{}", "empty": b""}


def make(tree, content, executable=()):
    """A finished result: folder, manifest and the stamps taken before hashing, as the runner makes them."""
    with files.new_tree(tree) as out:
        for name, data in content.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(data)
            if name in executable:
                (out / name).chmod(0o755)
        stamps = manifest.stamp_files(out)
        entries = manifest.list_files(out)
    return entries, stamps


def put(store, tree, content, ingredients=INGREDIENTS, executable=()):
    entries, stamps = make(tree, content, executable)
    store.put(manifest.Manifest(ingredients, entries), tree, stamps)
    return entries


def fetch(store, out, ingredients=INGREDIENTS):
    """What the store gives: path -> bytes, or None."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    found = store.fetch(ingredients, out)
    content = {path.relative_to(out).as_posix(): path.read_bytes() for path in files.tree_files(out)}
    assert found is None or [entry.path for entry in found] == sorted(content)
    return content if found is not None else (None if not content else pytest.fail("a miss left files"))
