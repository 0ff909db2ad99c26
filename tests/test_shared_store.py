"""A shared store in a bucket: whatever happens to line, server and objects, a build goes on and gets right bytes."""

import logging
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import boto3
import pytest
import s3fs

from tests import s3_inputs
from tests.conftest import ROOT, TINY
from tests.s3_inputs import BUCKET
from tests.store_inputs import CONTENT, INGREDIENTS, fetch, put
from workflow_scripts import progress
from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError
from workflow_scripts.files import tree_files
from workflow_scripts.store import levels, remote
from workflow_scripts.store.local import LocalStore
from workflow_scripts.store.shared import SharedStore

FORK = multiprocessing.get_context("fork")  # so also: a process that has used the store may fork
PART = 5 * 2**20  # the smallest part that S3 takes
BIG = CONTENT | {"big": os.urandom(2 * PART + 1)}  # goes up in three parts
OTHER = replace(INGREDIENTS, artifact="other")


@pytest.fixture(scope="module")
def server():
    with s3_inputs.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def host(monkeypatch, server):
    """This process may use the server, and big files go up in small parts."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setitem(remote._S3_UPLOAD, "chunksize", PART)
    use(monkeypatch, server.environment())


def use(monkeypatch, environment):
    """The environment of a host that starts a new process."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def line(server):
    """A proxy to the server."""
    opened = s3_inputs.Line(server.port)
    yield opened
    opened.close()


@pytest.fixture
def bucket(server):
    """The bucket as its owner sees it."""
    bucket = boto3.resource("s3").Bucket(BUCKET)
    bucket.objects.delete()
    return bucket


@pytest.fixture
def new_host(tmp_path, bucket):
    """Makes the store of one more host, whose own folder is empty."""
    numbers = iter(range(1000))
    return lambda url=f"s3://{BUCKET}/some/prefix": levels.Store(
        LocalStore(tmp_path / f"host{next(numbers)}"), SharedStore(url)
    )


def names(bucket):
    """Objects below the prefix and the version of the layout."""
    return sorted(found.key.removeprefix("some/prefix/v1/") for found in bucket.objects.all())


def kinds(bucket):
    return {name.partition("/")[0] for name in names(bucket)}


def warnings(caplog):
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "terminal" and record.levelno >= logging.WARNING
    ]


# --- round trip ------------------------------------------------------------------------------------


def test_a_result_goes_from_one_host_to_another(new_host, bucket, tmp_path, caplog):
    put(new_host(), tmp_path / "r", BIG)
    assert kinds(bucket) == {"entries", "blobs"}  # no copies, no temporary names
    there = new_host()
    assert there.find(INGREDIENTS) is not None
    assert fetch(there, tmp_path / "out") == BIG
    assert fetch(new_host(), tmp_path / "out", OTHER) is None
    assert warnings(caplog) == []


def test_equal_files_are_sent_once(new_host, bucket, tmp_path, line, monkeypatch, server):
    put(new_host(), tmp_path / "r", BIG)
    use(monkeypatch, server.environment(line.port))
    line.limit("up", PART)  # less than the big file
    put(new_host(), tmp_path / "r2", BIG, OTHER)
    assert fetch(new_host(), tmp_path / "out", OTHER) == BIG
    assert not line.reached.is_set()


def test_what_another_host_does_is_seen_at_once(new_host, bucket, tmp_path):
    """No listing, and no miss, is remembered."""
    here, there = new_host(), new_host()
    assert here.find(INGREDIENTS) is None
    put(there, tmp_path / "r", CONTENT)
    assert here.find(INGREDIENTS) is not None
    bucket.objects.delete()
    assert here.find(INGREDIENTS) is None
    put(here, tmp_path / "r2", CONTENT)  # the blobs that were there are sent again
    assert fetch(new_host(), tmp_path / "out") == CONTENT


def test_long_transfers_are_told(new_host, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "terminal")
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    put(new_host(), tmp_path / "r", BIG)
    assert fetch(new_host(), tmp_path / "out") == BIG
    for direction in ("upload to", "download from"):
        assert re.search(rf"{direction} the shared store: 0\.0 of 0\.0 GB, about \d+ s left", caplog.text)


# --- many hosts ------------------------------------------------------------------------------------


def work(new_host, folder, number):
    """In a child: the same result as all, and one of its own, there and back; exit code 0 if they came back."""
    own = replace(INGREDIENTS, artifact=f"own{number}")
    for turn in range(2):
        content = BIG | {"own": f"{number} {turn}".encode()}
        for ingredients, given in ((INGREDIENTS, BIG), (replace(own, inputs={"turn": str(turn)}), content)):
            put(new_host(), folder / f"r{number}", given, ingredients)
            if fetch(new_host(), folder / f"o{number}", ingredients) != given:
                os._exit(1)
    os._exit(0)


def test_hosts_that_write_the_same_and_other_results_do_not_disturb_each_other(new_host, bucket, tmp_path):
    put(new_host(), tmp_path / "r", CONTENT, OTHER)
    workers = [
        FORK.Process(target=work, args=(lambda n=n: host_of(tmp_path, n), tmp_path, n)) for n in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    assert sum(name.startswith("entries/") for name in names(bucket)) == 2 + 3 * 2
    assert fetch(new_host(), tmp_path / "out") == BIG


def host_of(folder, number):
    """A new host of a child, whose own folder is empty."""
    own = folder / f"child{number}"
    shutil.rmtree(own, ignore_errors=True)
    return levels.Store(LocalStore(own), SharedStore(f"s3://{BUCKET}/some/prefix"))


# --- a bad line ------------------------------------------------------------------------------------


def test_a_line_that_breaks_during_an_upload_leaves_no_entry(
    new_host, bucket, tmp_path, line, monkeypatch, server, caplog
):
    use(monkeypatch, server.environment(line.port))
    line.limit("up", PART)
    here = new_host()
    put(here, tmp_path / "r", BIG)
    put(here, tmp_path / "r2", CONTENT, OTHER)
    assert line.reached.is_set()
    (said,) = warnings(caplog)
    assert "shared store cannot be used" in said and "going on without it" in said
    assert fetch(here, tmp_path / "out") == BIG, "the result is kept on this host"
    assert "entries" not in kinds(bucket)

    use(monkeypatch, server.environment())
    assert fetch(new_host(), tmp_path / "out") is None
    put(new_host(), tmp_path / "r", BIG)
    assert fetch(new_host(), tmp_path / "out") == BIG


def test_a_line_that_breaks_during_a_download_gives_nothing(
    new_host, tmp_path, line, monkeypatch, server, caplog
):
    put(new_host(), tmp_path / "r", BIG)
    use(monkeypatch, server.environment(line.port))
    line.limit("down", PART)
    here = new_host()
    assert fetch(here, tmp_path / "out") is None
    assert line.reached.is_set()
    (said,) = warnings(caplog)
    assert "shared store cannot be used" in said
    put(here, tmp_path / "r2", BIG)  # the build has gone on
    assert fetch(here, tmp_path / "out") == BIG


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_transfer_goes_on_where_a_line_breaks_once(
    new_host, tmp_path, line, monkeypatch, server, caplog, direction
):
    if direction == "down":
        put(new_host(), tmp_path / "r", BIG)
    use(monkeypatch, server.environment(line.port))
    line.limit(direction, PART, once=True)
    if direction == "up":
        put(new_host(), tmp_path / "r", BIG)
    assert fetch(new_host(), tmp_path / "out") == BIG
    assert line.reached.is_set() and warnings(caplog) == []


def test_an_upload_that_is_killed_leaves_no_entry_and_the_next_succeeds(
    new_host, bucket, tmp_path, line, monkeypatch, server
):
    use(monkeypatch, server.environment(line.port))
    line.limit("up", PART, hangs=True)
    child = FORK.Process(target=put, args=(new_host(), tmp_path / "r", BIG))
    child.start()
    assert line.reached.wait(30)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert kinds(bucket) <= {"blobs"}
    assert max(found.size for found in bucket.objects.all()) < len(BIG["big"])
    use(monkeypatch, server.environment())
    assert fetch(new_host(), tmp_path / "out") is None
    put(new_host(), tmp_path / "r2", BIG)
    assert fetch(new_host(), tmp_path / "out") == BIG


def test_a_dead_server_is_said_once_and_at_once(new_host, tmp_path, monkeypatch, server, caplog):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    use(monkeypatch, server.environment(port))
    goes_on_without(new_host(), tmp_path, caplog, "Could not connect", within=30)


def test_a_server_that_never_answers_is_not_waited_for(new_host, tmp_path, monkeypatch, server, caplog):
    options = remote._S3_OPTIONS["config_kwargs"]
    attempts = options["retries"]["total_max_attempts"] * remote._S3_REQUESTS
    assert attempts * options["read_timeout"] <= 80 and options["connect_timeout"] * attempts <= 20
    monkeypatch.setitem(options, "read_timeout", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(monkeypatch, server.environment(silent.getsockname()[1]))
        goes_on_without(new_host(), tmp_path, caplog, "timeout", within=30)


def goes_on_without(here, tmp_path, caplog, reason, within=None):
    """A miss, a put and a hit on this host's own folder, with one line on the terminal."""
    start = time.monotonic()
    assert fetch(here, tmp_path / "out") is None
    put(here, tmp_path / "r", CONTENT)
    assert fetch(here, tmp_path / "out") == CONTENT
    assert within is None or time.monotonic() - start < within
    (said,) = warnings(caplog)
    assert "the shared store cannot be used (" in said and said.endswith("going on without it")
    assert reason in said and "\n" not in said


# --- who may ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIANOBODY"}, "Access Key Id you provided does not exist"),
        ({"AWS_SECRET_ACCESS_KEY": "not-the-secret"}, "signature"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
    ],
)
def test_a_wrong_credential_is_said_once(new_host, tmp_path, monkeypatch, server, caplog, wrong, reason):
    use(monkeypatch, server.environment() | wrong)
    goes_on_without(new_host(), tmp_path, caplog, reason)
    assert server.secret not in caplog.text and "not-the-secret" not in caplog.text


def test_a_host_that_may_only_read_takes_results_and_says_that_it_gives_none(
    new_host, bucket, tmp_path, monkeypatch, server, caplog
):
    put(new_host(), tmp_path / "r", CONTENT)
    before = names(bucket)
    use(monkeypatch, server.environment(user="reader"))
    here = new_host()
    assert fetch(here, tmp_path / "out") == CONTENT
    assert fetch(here, tmp_path / "out2", OTHER) is None
    assert warnings(caplog) == []
    put(here, tmp_path / "r2", CONTENT, OTHER)
    (said,) = warnings(caplog)
    assert "the shared store cannot be used (" in said and "denied" in said.lower()
    assert names(bucket) == before


def test_a_missing_bucket_is_said_and_not_made(new_host, tmp_path, caplog):
    """It would be a miss for ever on a host that only reads."""
    here = new_host("s3://no-such-bucket/store")
    assert fetch(here, tmp_path / "out") is None
    assert len(warnings(caplog)) == 1
    goes_on_without(here, tmp_path, caplog, "bucket does not exist")
    assert [found.name for found in boto3.resource("s3").buckets.all()] == [BUCKET]


PASSWORDS = [
    "s3://me:se/cr+et@team/store",
    "sftp://me:se/cr+et@host/store",
    "simplecache::s3://me:se/cr+et@b/c",
]


@pytest.mark.parametrize("url", PASSWORDS)
def test_an_address_with_a_password_is_refused(url, tmp_path, monkeypatch):
    """In a config, where it would end in process lists; in the variable, where it would end in messages."""
    (tmp_path / "mine.yaml").write_text(f"store: {{shared: '{url}'}}")
    with pytest.raises(UserError, match=r"store\.shared: holds a password; .* AWS_ACCESS_KEY_ID") as refused:
        read_config([tmp_path / "mine.yaml"])
    assert "cr+et" not in str(refused.value)
    monkeypatch.setenv("GEMMA4_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("GEMMA4_STORE_SHARED", url)
    with pytest.raises(UserError, match=r"password: take it out of GEMMA4_STORE_SHARED") as refused:
        levels.open_store(None, None)
    assert "cr+et" not in str(refused.value)


@pytest.mark.parametrize("url", ["s3://team/store", "sftp://me@host/store", "file:///a folder/b@c:d", "off"])
def test_an_address_without_a_password_is_taken(url, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"store: {{shared: '{url}'}}")
    assert read_config([tmp_path / "mine.yaml"]).store.shared == (None if url == "off" else url)


def stage(folder, environment):
    """Run a stage as a rule does; returns what it said. Process lists meanwhile go to `folder`."""
    params = '{"source": "x", "allow_moving_revision": false, "sha256": {}, "num_hidden_layers": 10}'
    command = [sys.executable, "-m", "workflow_scripts", "stage", "checkpoint", "--input", f"source={TINY}"]
    command += ["--params", params, "--output", str(folder / "text.manifest.json")]
    command += ["--log", str(folder / "stage.log"), "--store", str(folder / "store")]
    command += ["--shared-store", f"s3://{BUCKET}/some/prefix"]
    run = subprocess.Popen(
        command,
        env=os.environ | {"GEMMA4_STORE": ""} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with (folder / "processes").open("w") as listed:
        while run.poll() is None:
            subprocess.run(["ps", "-A", "-o", "args="], stdout=listed, check=True)
            time.sleep(0.2)
    said, _ = run.communicate()
    (folder / "said").write_text(said)
    assert run.returncode == 0, said
    return said


def test_a_secret_is_in_nothing_that_is_written(tmp_path, server, bucket):
    """Logs, messages, manifests, stores, records of usage, process lists and the bucket; with success and failure."""
    login = "ho5t-pa55word"
    for name, changes, expected in (
        ("good", {}, "built: "),
        ("hit", {}, "from the store: "),
        (
            "unreachable",
            {"AWS_ENDPOINT_URL": f"http://me:{login}@127.0.0.1:9"},
            "shared store cannot be used",
        ),
    ):
        (tmp_path / name).mkdir()
        assert expected in stage(tmp_path / name, server.environment() | changes), name
    written = {path.as_posix(): path.read_bytes() for path in tree_files(tmp_path)}
    written |= {found.key: found.get()["Body"].read() for found in bucket.objects.all()}
    assert any("stage.log" in path for path in written) and any("entries/" in path for path in written)
    assert b"workflow_scripts stage checkpoint" in written[f"{tmp_path}/good/processes"]
    for path, data in written.items():
        assert server.secret.encode() not in data and login.encode() not in data, path


# --- damage and eviction ---------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "record", "half record", "no text"])
def test_a_damaged_object_is_not_taken_and_is_replaced(new_host, bucket, tmp_path, caplog, damage):
    put(new_host(), tmp_path / "r", BIG)
    sizes = {found.key: found.size for found in bucket.objects.all()}
    big = bucket.Object(max(sizes, key=sizes.get))
    record = bucket.Object(next(key for key in sizes if "/entries/" in key))
    text = record.get()["Body"].read()
    match damage:
        case "flipped":
            big.put(Body=bytes([BIG["big"][0] ^ 1]) + BIG["big"][1:])
        case "cut":
            big.put(Body=BIG["big"][:-1])
        case "empty":
            big.put(Body=b"")
        case "record":
            record.put(Body=text.replace(b"measured.json", b"measured.jsom"))
        case "half record":
            record.put(Body=text[: len(text) // 2])
        case "no text":
            record.put(Body=b"\xff" + text)
    there = new_host()
    assert fetch(there, tmp_path / "out") is None
    (said,) = warnings(caplog)
    assert "the shared store has a damaged entry" in said and "building again" in said
    put(there, tmp_path / "r2", BIG)  # the rebuilt result is uploaded again
    assert fetch(new_host(), tmp_path / "out") == BIG


def test_a_damaged_object_is_replaced_by_a_host_that_may_not_delete(
    new_host, bucket, tmp_path, monkeypatch, server
):
    put(new_host(), tmp_path / "r", BIG)
    sizes = {found.key: found.size for found in bucket.objects.all()}
    bucket.Object(max(sizes, key=sizes.get)).put(Body=bytes([BIG["big"][0] ^ 1]) + BIG["big"][1:])
    use(monkeypatch, server.environment(user="writer"))
    there = new_host()
    assert fetch(there, tmp_path / "out") is None
    put(there, tmp_path / "r2", BIG)
    assert fetch(new_host(), tmp_path / "out") == BIG


def test_a_damaged_record_hides_no_other_entry(new_host, bucket, tmp_path, caplog):
    """`why` and `plan` ask for all results one after the other."""
    put(new_host(), tmp_path / "r", CONTENT)
    (record,) = (found for found in bucket.objects.all() if "/entries/" in found.key)
    put(new_host(), tmp_path / "r2", CONTENT, OTHER)
    record.put(Body=b"{")
    here = new_host()
    assert here.find(INGREDIENTS) is None and here.find(OTHER) is not None
    assert warnings(caplog) == []


def test_a_cut_object_is_replaced_by_who_has_it_whole(new_host, bucket, tmp_path):
    put(new_host(), tmp_path / "r", BIG)
    sizes = {found.key: found.size for found in bucket.objects.all()}
    bucket.Object(max(sizes, key=sizes.get)).put(Body=b"cut")
    put(new_host(), tmp_path / "r2", BIG, OTHER)
    assert fetch(new_host(), tmp_path / "out") == BIG


def test_an_entry_that_has_lost_an_object_is_a_miss_and_comes_back(new_host, bucket, tmp_path, caplog):
    """As a lifecycle rule deletes them, whichever goes first. Nothing is wrong, so nothing is said."""
    put(new_host(), tmp_path / "r", CONTENT)
    whole = names(bucket)
    assert len(whole) == len(CONTENT) + 1
    for name in whole:
        bucket.Object(f"some/prefix/v1/{name}").delete()
        here = new_host()
        here.find(INGREDIENTS)  # may find it: what `why` then announces is built instead
        assert fetch(here, tmp_path / "out") is None, name
        put(here, tmp_path / "r2", CONTENT)
        assert names(bucket) == whole
        assert fetch(new_host(), tmp_path / "out") == CONTENT
    assert warnings(caplog) == []


def test_a_reader_gets_the_whole_or_nothing_while_objects_are_deleted(new_host, bucket, tmp_path, caplog):
    def evict():
        while True:
            for found in bucket.objects.all():
                found.delete()

    worker = FORK.Process(target=evict)
    worker.start()
    outcomes, turn = [], 0
    try:
        while turn < 10 or (None not in outcomes and turn < 200):
            turn += 1
            put(new_host(), tmp_path / "r", CONTENT)
            outcomes.append(fetch(new_host(), tmp_path / "out"))
    finally:
        worker.kill()
        worker.join()
    assert all(outcome in (None, CONTENT) for outcome in outcomes)
    assert None in outcomes, "nothing was deleted in between: the test shows nothing"
    assert warnings(caplog) == []
    put(new_host(), tmp_path / "r", CONTENT)
    assert fetch(new_host(), tmp_path / "out") == CONTENT


# --- what it takes ---------------------------------------------------------------------------------

TRANSFER = """
import sys, threading
from pathlib import Path
import psutil
from workflow_scripts.store.remote import Remote

peak, ended = 0, threading.Event()

def watch():
    global peak
    while not ended.wait(0.005):
        peak = max(peak, psutil.Process().memory_info().rss)

remote, big = Remote(sys.argv[1]), Path(sys.argv[2])
remote.write(b"warm", "warm")
start = psutil.Process().memory_info().rss
watcher = threading.Thread(target=watch)
watcher.start()
remote.upload(big, "big")
print(peak - start)
peak = 0
remote.download("big", big.with_name("back"), big.stat().st_size)
print(peak - start)
ended.set()
"""


def test_a_big_file_goes_there_and_back_in_little_memory(bucket, tmp_path):
    size = 300_000_000
    with (tmp_path / "big").open("wb") as stream:
        stream.truncate(size)
    command = [sys.executable, "-c", TRANSFER, f"s3://{BUCKET}/memory", str(tmp_path / "big")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    up, down = map(int, run.stdout.split())
    assert (tmp_path / "back").stat().st_size == size
    assert 0 < up < 200_000_000, run.stdout
    assert 0 < down < 200_000_000, run.stdout
