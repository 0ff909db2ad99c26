"""The store: what comes out is what went in or nothing, whatever happens to the folder in between."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import TINY
from tests.store_inputs import CONTENT, INGREDIENTS, fetch, make, put
from workflow_scripts import files, manifest
from workflow_scripts.errors import UserError
from workflow_scripts.store import blobs, command, levels
from workflow_scripts.store.errors import Damaged
from workflow_scripts.store.local import LocalStore, parse_record, record_of
from workflow_scripts.store.shared import SharedStore


@pytest.fixture(autouse=True)
def no_flush(monkeypatch):
    """Power loss is not tested here, and waiting for the disk is most of what a small put takes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def store(tmp_path):
    return levels.Store(LocalStore(tmp_path / "store"), None)


@pytest.fixture
def linked(monkeypatch):
    """Treat every file as a large one, on a file system that cannot clone: hard links and stamps."""
    monkeypatch.setattr(blobs, "LINK_FROM", 0)
    monkeypatch.setattr(blobs, "clone_file", lambda source, target: False)


def blob_files(store):
    return [path for path in (store.local.root / "blobs").rglob("*") if path.is_file()]


def blob_of(store, data):
    import hashlib

    return store.local.blobs.path(hashlib.sha256(data).hexdigest())


def no_tmp(store):
    return not list((store.local.root / "tmp").glob("*"))


# --- round trip and key ---------------------------------------------------------------------------

NAMES = st.text("abc.é ", min_size=1, max_size=4).filter(
    lambda name: name.strip(".") == name and name.strip()
)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=40), st.booleans()),
    max_size=6,
).filter(lambda tree: not any(a != b and b.startswith(f"{a}/") for a in tree for b in tree))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, limit=st.sampled_from([0, 10, 2**20]))
def test_any_tree_comes_back_with_its_modes(tmp_path_factory, tree, limit):
    home = tmp_path_factory.mktemp("trip")
    store = levels.Store(LocalStore(home / "store"), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs, "LINK_FROM", limit)
        patch.setattr(blobs, "SETTLE", 0.0)
        content = {name: data for name, (data, _) in tree.items()}
        executable = [name for name, (_, is_executable) in tree.items() if is_executable]
        entries = put(store, home / "result", content, executable=executable)
        assert fetch(store, home / "out") == content
    for name, (_, is_executable) in tree.items():
        assert bool((home / "out" / name).stat().st_mode & 0o111) == is_executable
    assert manifest.list_files(home / "out") == entries
    assert len(blob_files(store)) == len(set(content.values()))


@given(
    st.sampled_from(["stage", "artifact", "code", "params", "inputs", "tools"]),
    st.text(min_size=1, max_size=3),
)
def test_every_ingredient_is_in_the_key_and_their_order_is_not(part, text):
    value = getattr(INGREDIENTS, part)
    other = f"{value}{text}" if isinstance(value, str) else {**value, f"x{text}": text}
    assert replace(INGREDIENTS, **{part: other}).key != INGREDIENTS.key
    if isinstance(value, dict):
        forth, back = {**value, f"x{text}": 1}, {f"x{text}": 1, **value}
        assert replace(INGREDIENTS, **{part: forth}).key == replace(INGREDIENTS, **{part: back}).key


def test_another_key_is_a_miss(store, tmp_path):
    put(store, tmp_path / "r", CONTENT)
    assert fetch(store, tmp_path / "out", replace(INGREDIENTS, params={"recipe": "fp32"})) is None
    assert fetch(store, tmp_path / "out") == CONTENT


def test_a_moving_revision_is_never_stored(store, tmp_path):
    moving = replace(INGREDIENTS, params={"source": "hf://google/gemma@main", "allow_moving_revision": True})
    put(store, tmp_path / "r", CONTENT, moving)
    assert fetch(store, tmp_path / "out", moving) is None and store.find(moving) is None
    pinned = replace(INGREDIENTS, params={"source": f"hf://google/gemma@{'a' * 40}"})
    put(store, tmp_path / "r", CONTENT, pinned)
    assert fetch(store, tmp_path / "out", pinned) == CONTENT


# --- edits and damage -----------------------------------------------------------------------------


def overwrite(path, keep_mtime):
    """Flip a byte in place, as root or after a chmod can."""
    before = path.stat()
    path.chmod(before.st_mode | 0o200)
    with path.open("r+b") as stream:
        byte = stream.read(1)
        stream.seek(0)
        stream.write(bytes([byte[0] ^ 1]))
    path.chmod(before.st_mode)
    if keep_mtime:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_copies_share_nothing_with_the_store(store, tmp_path):
    put(store, tmp_path / "r", CONTENT)
    fetch(store, tmp_path / "out")
    overwrite(tmp_path / "r/a.bin", keep_mtime=True)
    overwrite(tmp_path / "out/a.bin", keep_mtime=True)
    assert (tmp_path / "out/a.bin").stat().st_mode & 0o777 == 0o644
    assert fetch(store, tmp_path / "again") == CONTENT


def test_links_are_read_only_on_every_side(store, tmp_path, linked):
    put(store, tmp_path / "r", CONTENT)
    assert fetch(store, tmp_path / "out") == CONTENT
    for path in (tmp_path / "r/a.bin", tmp_path / "out/a.bin", blob_of(store, b"one")):
        assert path.stat().st_nlink == 3 and path.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("keep_mtime", [False, True])
@pytest.mark.parametrize("side", ["r", "out"])
def test_an_edit_through_a_link_is_never_served(store, tmp_path, linked, keep_mtime, side, caplog):
    """The result that was stored, or one that was served: both are the store's own file."""
    put(store, tmp_path / "r", CONTENT)
    assert fetch(store, tmp_path / "out") == CONTENT
    overwrite(tmp_path / side / "a.bin", keep_mtime)
    assert fetch(store, tmp_path / "again") is None
    assert "has a damaged entry" in caplog.text and "not used" in caplog.text
    put(store, tmp_path / "rebuilt", CONTENT)
    assert fetch(store, tmp_path / "again") == CONTENT


def test_an_edit_between_hash_and_put_is_not_stored(store, tmp_path, linked):
    entries, stamps = make(tmp_path / "r", CONTENT)
    overwrite(tmp_path / "r/a.bin", keep_mtime=True)
    store.put(manifest.Manifest(INGREDIENTS, entries), tmp_path / "r", stamps)
    assert fetch(store, tmp_path / "out") is None


def test_linked_files_are_hashed_once_and_not_at_every_hit(store, tmp_path, linked, monkeypatch):
    put(store, tmp_path / "r", CONTENT)
    hashed = []
    monkeypatch.setattr(blobs, "sha256_file", lambda path: hashed.append(path) or files.sha256_file(path))
    for name in ("one", "two", "three"):
        assert fetch(store, tmp_path / name) == CONTENT
    assert hashed == []
    os.link(
        tmp_path / "one/a.bin", tmp_path / "mine"
    )  # the user's own link moves the ctime: hashed once more
    assert fetch(store, tmp_path / "four") == CONTENT and len(hashed) == 1
    assert fetch(store, tmp_path / "five") == CONTENT and len(hashed) == 1


def test_a_file_with_a_writable_name_elsewhere_is_not_linked(store, tmp_path, linked, caplog):
    caplog.set_level("INFO")
    (tmp_path / "mine").write_bytes(b"one")
    with files.new_tree(tmp_path / "r") as out:
        os.link(tmp_path / "mine", out / "a.bin")
        stamps, entries = manifest.stamp_files(out), manifest.list_files(out)
    store.put(manifest.Manifest(INGREDIENTS, entries), tmp_path / "r", stamps)
    assert fetch(store, tmp_path / "out") is None and "not stored" in caplog.text
    assert (tmp_path / "mine").stat().st_mode & 0o200 and blob_files(store) == [] and no_tmp(store)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete", "record", "record_path"])
def test_damage_is_said_dropped_and_healed(store, tmp_path, damage, caplog):
    put(store, tmp_path / "r", CONTENT)
    blob, record = blob_of(store, b"one"), store.local.entry_path(INGREDIENTS.key)
    match damage:
        case "flip":
            overwrite(blob, keep_mtime=True)
        case "cut":
            blob.chmod(0o644)
            blob.write_bytes(b"on")
        case "delete":
            blob.unlink()
        case "record":
            record.write_text(record.read_text().replace("measured.json", "measured.jsom"))
        case "record_path":
            content = store.local.read(INGREDIENTS.key)
            moved = replace(content.files[0], path="../outside")
            record.write_text(record_of(manifest.Manifest(INGREDIENTS, [moved, *content.files[1:]])))
    assert fetch(store, tmp_path / "out") is None
    assert sum(record.name == "terminal" for record in caplog.records) == 1
    assert not record.exists() and not (tmp_path / "outside").exists()
    put(store, tmp_path / "r", CONTENT)
    assert fetch(store, tmp_path / "out") == CONTENT


def test_no_changed_record_is_believed():
    """Every bit of the record, flipped once."""
    record = record_of(manifest.Manifest(INGREDIENTS, [manifest.FileEntry("a", 1, "0" * 64)]))
    original = json.loads(record)
    assert parse_record(record, INGREDIENTS.key)
    for at in range(len(record)):
        for bit in range(7):
            changed = record[:at] + chr(ord(record[at]) ^ 1 << bit) + record[at + 1 :]
            try:
                same = json.loads(changed) == original  # white space may change
            except ValueError:
                same = False
            if not same:
                with pytest.raises(Damaged):
                    parse_record(changed, INGREDIENTS.key)


# --- many processes, killed processes -------------------------------------------------------------

FORK = multiprocessing.get_context("fork")


def test_writers_and_readers_of_one_key_do_not_disturb_each_other(store, tmp_path):
    big = CONTENT | {"big": os.urandom(2**20)}

    def work(number):
        for turn in range(6):
            put(store, tmp_path / f"r{number}", big)
            if fetch(store, tmp_path / f"o{number}-{turn}") != big:
                os._exit(1)

    workers = [FORK.Process(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert fetch(store, tmp_path / "out") == big and no_tmp(store)


def test_a_reader_gets_the_whole_or_nothing_while_another_prunes(store, tmp_path, caplog):
    content = {f"f{number}": os.urandom(1000) for number in range(8)}
    stop = FORK.Event()

    def prune():
        while not stop.wait(0.005):
            command.main(["--store", str(store.local.folder), "prune", "--max-size", "0"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GEMMA4_STORE", str(store.local.folder))
        patch.setattr("builtins.print", lambda *_: None)
        worker = FORK.Process(target=prune)
        worker.start()
    outcomes = []
    try:
        turn = 0
        while turn < 25 or (None not in outcomes and turn < 2000):  # on a busy host the pruner may come late
            turn += 1
            put(store, tmp_path / "r", content)
            outcomes.append(fetch(store, tmp_path / f"o{turn}"))
    finally:
        stop.set()
        worker.join()
    assert all(outcome in (None, content) for outcome in outcomes)
    assert "damaged" not in caplog.text
    assert None in outcomes, "nothing was pruned in between: the test shows nothing"


def test_prune_waits_for_readers_and_writers(store, tmp_path):
    put(store, tmp_path / "r", CONTENT)
    arguments = [sys.executable, "-m", "workflow_scripts", "store", "prune", "--max-size", "0"]
    environment = os.environ | {"GEMMA4_STORE": str(store.local.folder)}
    with store.local.lock():  # a process of its own: a fork would inherit the lock
        worker = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.6)
        assert store.find(INGREDIENTS)
    assert worker.wait(20) == 0 and store.find(INGREDIENTS) is None


def put_and_die(store, tree, step):
    """In a child: kill -9 right before the given rename into the store."""
    replaced, count = Path.replace, iter(range(1, 100))

    def replace_or_die(path, target):
        if store.local.folder in Path(target).parents and next(count) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return replaced(path, target)

    Path.replace = replace_or_die
    put(store, tree, CONTENT)


def test_a_put_killed_at_any_step_leaves_a_miss_or_the_whole(store, tmp_path):
    """Steps are the renames into place: each blob, then the record."""
    outcomes = []
    for step in range(1, len(CONTENT) + 3):
        shutil.rmtree(store.local.folder, ignore_errors=True)
        child = FORK.Process(target=put_and_die, args=(store, tmp_path / "r", step))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        outcomes.append((child.exitcode != 0, fetch(store, tmp_path / "out")))
        put(store, tmp_path / "r2", CONTENT)
        assert fetch(store, tmp_path / "out") == CONTENT
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GEMMA4_STORE", str(store.local.folder))
            assert command.main(["prune", "--older-than", "1d"]) == 0
        assert no_tmp(store) and fetch(store, tmp_path / "out") == CONTENT
    killed = [outcome for was_killed, outcome in outcomes if was_killed]
    assert len(killed) >= len(CONTENT) and set(map(str, killed)) == {"None"}
    assert outcomes[-1] == (False, CONTENT)


# --- trouble that must not break a build ----------------------------------------------------------


def test_a_full_store_is_said_once_and_leaves_no_entry(tmp_path, caplog):
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True
    ).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        store = levels.Store(LocalStore(mount / "store"), None)
        for name in ("a", "b"):
            put(store, tmp_path / name, CONTENT | {"big": os.urandom(2**20)})
        said = [record for record in caplog.records if record.name == "terminal"]
        assert len(said) == 1 and os.strerror(errno.ENOSPC) in said[0].getMessage()
        assert fetch(store, tmp_path / "out") is None and no_tmp(store)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")  # as good as no permission, and true for root, too
    store = levels.Store(LocalStore(tmp_path / "file" / "store"), None)
    for name in ("a", "b"):
        assert fetch(store, tmp_path / "out") is None
        put(store, tmp_path / name, CONTENT)
    said = [record.getMessage() for record in caplog.records if record.name == "terminal"]
    assert len(said) == 1 and "cannot be used" in said[0] and "going on without" in said[0]


def test_a_store_that_can_only_be_read_still_serves(store, tmp_path):
    put(store, tmp_path / "r", CONTENT)
    mount = tmp_path / "read-only"
    mount.mkdir()
    if subprocess.run(
        ["mount", "--bind", str(store.local.folder), str(mount)], capture_output=True
    ).returncode:
        pytest.skip("a read-only mount needs root")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(mount)], check=True)
        read_only = levels.Store(LocalStore(mount), None)
        assert fetch(read_only, tmp_path / "out") == CONTENT
        put(read_only, tmp_path / "r2", CONTENT, replace(INGREDIENTS, artifact="other"))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# --- the shared level -----------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    yield f"{request.param}://{tmp_path}/shared with space"
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").store.clear()


def test_a_result_goes_from_one_machine_to_another(url, tmp_path):
    here = levels.Store(LocalStore(tmp_path / "here"), SharedStore(url))
    put(here, tmp_path / "r", CONTENT)
    there = levels.Store(LocalStore(tmp_path / "there"), SharedStore(url))
    assert there.find(INGREDIENTS).digest == here.find(INGREDIENTS).digest
    assert fetch(there, tmp_path / "out") == CONTENT
    alone = levels.Store(there.local, None)
    assert fetch(alone, tmp_path / "out") == CONTENT, "the local level was not filled"


def test_large_files_go_over_the_shared_level_too(url, tmp_path, linked):
    here = levels.Store(LocalStore(tmp_path / "here"), SharedStore(url))
    put(here, tmp_path / "r", CONTENT)
    assert fetch(levels.Store(LocalStore(tmp_path / "there"), SharedStore(url)), tmp_path / "out") == CONTENT


def test_a_damaged_shared_blob_is_not_taken_and_is_replaced(url, tmp_path, caplog):
    import fsspec

    put(levels.Store(LocalStore(tmp_path / "here"), SharedStore(url)), tmp_path / "r", CONTENT)
    system, root = fsspec.core.url_to_fs(url)
    blob = next(path for path in system.find(f"{root}/v1/blobs") if system.cat_file(path) == b"one")
    system.pipe_file(blob, b"two")
    there = levels.Store(LocalStore(tmp_path / "there"), SharedStore(url))
    assert fetch(there, tmp_path / "out") is None and "damaged" in caplog.text
    put(there, tmp_path / "r2", CONTENT)  # the rebuilt result is uploaded again
    assert fetch(levels.Store(LocalStore(tmp_path / "third"), SharedStore(url)), tmp_path / "out") == CONTENT


def test_an_upload_that_breaks_off_leaves_no_entry(url, tmp_path, monkeypatch):
    monkeypatch.setattr("workflow_scripts.store.shared._entry", lambda key: 1 / 0)
    put(levels.Store(LocalStore(tmp_path / "here"), SharedStore(url)), tmp_path / "r", CONTENT)
    monkeypatch.undo()
    assert fetch(levels.Store(LocalStore(tmp_path / "there"), SharedStore(url)), tmp_path / "out") is None


@pytest.mark.parametrize(
    "bad",
    ["nosuchprotocol://secret:word@host/x", "http://127.0.0.1:9/store", "file:///proc/nowhere/store"],
)
def test_a_shared_store_that_fails_is_said_once_without_its_address(bad, tmp_path, caplog):
    store = levels.Store(LocalStore(tmp_path / "store"), SharedStore(bad))
    assert fetch(store, tmp_path / "out") is None
    put(store, tmp_path / "a", CONTENT)
    put(store, tmp_path / "b", CONTENT, replace(INGREDIENTS, artifact="b"))
    assert fetch(store, tmp_path / "out") == CONTENT
    said = [record.getMessage() for record in caplog.records if record.name == "terminal"]
    assert len(said) == 1 and "shared store cannot be used" in said[0]
    assert "word" not in caplog.text


# --- the command line of a stage ------------------------------------------------------------------

PARAMS = {"source": str(TINY), "allow_moving_revision": False, "sha256": {}, "num_hidden_layers": 10}


def run_stage(folder, name, artifact, params, *inputs, store, options=(), python=(), code=0):
    output = folder / name / f"{artifact}{manifest.SUFFIX}"
    arguments = [
        "--params",
        json.dumps(params),
        "--output",
        str(output),
        "--log",
        str(folder / f"{name}.log"),
    ]
    environment = os.environ | {"GEMMA4_STORE": str(store) if store else ""}
    run = subprocess.run(
        [
            sys.executable,
            *python,
            "-m",
            "workflow_scripts",
            "stage",
            name,
            "--input",
            *inputs,
            *arguments,
            *options,
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == code, run.stderr
    return output, run.stderr


def test_a_hit_gives_the_manifest_a_build_writes_and_imports_nothing_heavy(tmp_path):
    built, said = run_stage(
        tmp_path / "1", "checkpoint", "text", PARAMS, f"source={TINY}", store=tmp_path / "s"
    )
    assert "built: " in said
    stored, said = run_stage(
        tmp_path / "2",
        "checkpoint",
        "text",
        PARAMS,
        f"source={TINY}",
        store=tmp_path / "s",
        python=["-X", "importtime"],
    )
    assert "from the store: " in said
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines() if "|" in line
    }
    log = (tmp_path / "2/checkpoint.log").read_text()
    imported |= {
        line.rpartition("|")[2].strip().partition(".")[0] for line in log.splitlines() if "|" in line
    }
    assert "workflow_scripts" in imported
    assert not imported & {"torch", "numpy", "coreai", "transformers", "fsspec", "ml_dtypes", "yaml"}
    assert stored.read_bytes() == built.read_bytes()
    assert manifest.verify_tree(stored) == manifest.verify_tree(built)


def test_the_argument_of_a_rule_names_the_store_and_the_environment_goes_over_it(tmp_path):
    arguments = ("checkpoint", "text", PARAMS, f"source={TINY}")
    options = ["--store", str(tmp_path / "rule"), "--shared-store", f"file://{tmp_path}/team"]
    run_stage(tmp_path / "1", *arguments, store=None, options=options)
    assert (tmp_path / "rule/v1/entries").is_dir() and (tmp_path / "team/v1/entries").is_dir()
    _, said = run_stage(tmp_path / "2", *arguments, store="off", options=options)
    assert "built: " in said
    shutil.rmtree(tmp_path / "rule")
    _, said = run_stage(tmp_path / "3", *arguments, store=None, options=options)
    assert "from the store: " in said


def test_a_failed_stage_stores_nothing(tmp_path):
    params = PARAMS | {"num_hidden_layers": 35}
    run_stage(tmp_path / "r", "checkpoint", "text", params, f"source={TINY}", store=tmp_path / "s", code=1)
    assert not list(tmp_path.glob("s/v1/entries/*"))


def test_a_plain_input_is_hashed_once(tmp_path, monkeypatch):
    """Also after the stage placed hard links of it, which move its ctime."""
    source = tmp_path / "checkpoint"
    shutil.copytree(TINY, source)
    arguments = ("checkpoint", {"source": source}, PARAMS, tmp_path / "r" / f"text{manifest.SUFFIX}")
    from workflow_scripts.stages import runner

    first = runner.execute(*arguments)
    hashed = []
    monkeypatch.setattr(files, "sha256_file", lambda path: hashed.append(path.name) or "0" * 64)
    memory = files.HashMemory(runner.hash_memory_path(arguments[-1]))
    assert runner.input_digest(source, memory) == first.manifest.ingredients.inputs["source"] and hashed == []
    time.sleep(0.01)
    overwrite(source / "config.json", keep_mtime=True)
    assert runner.input_digest(source, memory) != first.manifest.ingredients.inputs["source"]
    assert hashed == ["config.json"]


# --- list, size, prune, verify --------------------------------------------------------------------


@pytest.fixture
def filled(store, tmp_path, monkeypatch):
    """Three entries of 1000 bytes, the first used last; two share a file."""
    monkeypatch.setenv("GEMMA4_STORE", str(store.local.folder))
    shared = os.urandom(500)
    made = [replace(INGREDIENTS, artifact=name) for name in ("first", "second", "third")]
    for age, ingredients in zip((3, 2, 1), made, strict=True):
        own = os.urandom(500)
        put(store, tmp_path / "r", {"own": own, "other": shared if age > 1 else os.urandom(500)}, ingredients)
        old = time.time() - age * 86_400
        for path in (store.local.entry_path(ingredients.key), store.local.root / "used" / ingredients.key):
            os.utime(path, (old, old))
    fetch(store, tmp_path / "out", made[0])
    return made


def test_list_and_size(filled, capsys):
    assert command.main(["list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["STAGE", "ARTIFACT", "SIZE", "AGE", "KEY"]
    assert lines[1:] == [
        ["weights", made.artifact, "1.0", "kB", age, made.key[:12]]
        for made, age in zip(reversed(filled), ("1d", "2d", "3d"), strict=True)
    ]
    assert command.main(["size"]) == 0
    sizes = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {key.strip(): value.strip() for key, value in sizes.items() if "folder" not in key} == {
        "entries": "3",
        "bytes": "3,000",
        "unique bytes": "2,500",
    }


@pytest.mark.parametrize(
    ("limit", "left"),
    [
        (["--older-than", "36h"], {"first", "third"}),
        (["--max-size", "2.5kB"], {"first", "second", "third"}),
        (["--max-size", "2kB"], {"first", "third"}),
        (["--max-size", "1999"], {"first"}),
        (["--older-than", "1h", "--max-size", "1GB"], {"first"}),
        (["--max-size", "0"], set()),
    ],
)
def test_prune_deletes_the_least_recently_used(filled, store, tmp_path, limit, left, capsys):
    assert command.main(["prune", *limit]) == 0
    assert f"deleted {3 - len(left)} of 3 entries" in capsys.readouterr().out
    assert {made.artifact for made in filled if fetch(store, tmp_path / "out", made)} == left
    needed = {file.sha256 for entry in store.local.entries() for file in entry.manifest.files}
    assert {path.name for path in blob_files(store)} == needed


@pytest.mark.parametrize(
    ("arguments", "help"),
    [
        (["prune"], "--older-than 30d"),
        (["prune", "--max-size", "20XB"], "write 500MB, 20GB"),
        (["prune", "--older-than", "x"], "write 12h, 30d"),
    ],
)
def test_prune_asks_for_a_limit(filled, arguments, help, capsys):
    with pytest.raises((UserError, SystemExit)) as problem:
        command.main(arguments)
    assert help in f"{problem.value} {capsys.readouterr().err}"


def test_verify_finds_and_repairs_what_stamps_would_pass(filled, store, tmp_path, capsys):
    assert command.main(["verify"]) == 0 and "3 entries, all whole" in capsys.readouterr().out
    found = store.local.read(filled[2].key)
    overwrite(store.local.blobs.path(found.files[0].sha256), keep_mtime=True)
    assert command.main(["verify"]) == 1
    out = capsys.readouterr().out
    assert "third" in out and found.files[0].path in out and "second" not in out
    assert command.main(["verify", "--repair"]) == 1
    assert command.main(["verify"]) == 0 and "2 entries, all whole" in capsys.readouterr().out
    assert fetch(store, tmp_path / "out", filled[2]) is None
    assert fetch(store, tmp_path / "out", filled[1]) is not None


def test_the_store_is_the_one_that_the_config_names(tmp_path, monkeypatch, capsys):
    """The last model file decides, as in a build; --store goes over it, and the environment over both."""
    for name in ("first", "second", "third", "fourth"):
        own = levels.Store(LocalStore(tmp_path / name), None)
        put(own, tmp_path / "r", CONTENT, replace(INGREDIENTS, artifact=name))
        (tmp_path / f"{name}.yaml").write_text(f"store: {{folder: {tmp_path / name}}}")
    monkeypatch.delenv("GEMMA4_STORE")
    model_files = ["--configfile", str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")]

    def listed(*arguments):
        assert command.main([*arguments]) == 0
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert listed("list", *model_files) == ["second"]
    assert listed("--store", str(tmp_path / "third"), "list", *model_files) == ["third"]
    monkeypatch.setenv("GEMMA4_STORE", str(tmp_path / "fourth"))
    assert listed("--store", str(tmp_path / "third"), "list", *model_files) == ["fourth"]
    assert command.main(["prune", "--max-size", "0", *model_files]) == 0
    assert "deleted 1 of 1 entries" in capsys.readouterr().out
    monkeypatch.delenv("GEMMA4_STORE")
    assert listed("list", *model_files) == ["second"]


def test_without_a_model_file_it_is_the_default_config_s(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GEMMA4_STORE")
    monkeypatch.setattr(levels, "default_folder", lambda: tmp_path / "cache")
    assert command.main(["size"]) == 0
    assert str(tmp_path / "cache") in capsys.readouterr().out


def test_a_store_that_is_off_or_a_wrong_config_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("GEMMA4_STORE")
    (tmp_path / "off.yaml").write_text("store: {folder: 'off', shared: 'memory://x'}")
    with pytest.raises(UserError, match=r"the store is off.*store\.folder"):
        command.main(["list", "--configfile", str(tmp_path / "off.yaml")])
    (tmp_path / "wrong.yaml").write_text("store: {foldr: x}")
    with pytest.raises(UserError, match=r"store\.foldr: unknown key"):
        command.main(["list", "--configfile", str(tmp_path / "wrong.yaml")])


@pytest.mark.parametrize("arguments", [["list"], ["size"], ["prune", "--max-size", "0"], ["verify"]])
def test_a_folder_that_cannot_be_used_is_one_line(tmp_path, arguments, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GEMMA4_STORE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"^the store .*file cannot be used: Not a directory$"):
        command.main(arguments)


def test_the_command_line_says_it_in_one_line(tmp_path):
    """Also from another folder than the project's."""
    (tmp_path / "file").write_text("")
    (tmp_path / "mine.yaml").write_text("store: {folder: file}")
    arguments = [sys.executable, "-m", "workflow_scripts", "store", "list", "--configfile", "mine.yaml"]
    environment = {name: value for name, value in os.environ.items() if name != "GEMMA4_STORE"}
    run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"error: the store {tmp_path}/file cannot be used: Not a directory\n"


def test_any_trouble_of_the_file_system_is_one_line(monkeypatch, capsys):
    from workflow_scripts import __main__

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/file")

    monkeypatch.setattr(command, "main", fail)
    assert __main__.main(["store", "list"]) == 1
    assert capsys.readouterr().err == "error: /disk/file: No space left on device\n"


def test_a_reader_that_goes_away_is_no_trouble(store, tmp_path):
    put(store, tmp_path / "r", CONTENT)
    reader, writer = os.pipe()
    os.close(reader)
    environment = os.environ | {"GEMMA4_STORE": str(store.local.folder)}
    arguments = [sys.executable, "-m", "workflow_scripts", "store", "list"]
    run = subprocess.run(arguments, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def test_commands_on_a_store_that_is_not_there_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GEMMA4_STORE", str(tmp_path / "none"))
    for arguments in (["list"], ["size"], ["prune", "--max-size", "1"], ["verify"]):
        assert command.main(arguments) == 0
    assert not (tmp_path / "none").exists()
