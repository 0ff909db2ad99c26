"""Publishing a release with the real Hub client, to a Hub on this host."""

import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import release_inputs as given
from huggingface_hub import HfApi, constants

from tests.fakes import hub as fake
from workflow_scripts.closure import ROOT
from workflow_scripts.errors import UserError
from workflow_scripts.files import sha256_file, sha256_text, write_atomic
from workflow_scripts.release import publish, publish_check, seal, statement, sums

REPOSITORY = "somebody/gemma-4-tiny-CoreAI"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A release with a few files that the Hub stores apart from git, since they are no text."""
    root, chance = tmp_path_factory.mktemp("built"), random.Random(5)
    checkpoint = given.checkpoint(root)
    inputs = {
        "checkpoint": checkpoint,
        "bundle_core": given.bundle(root, "core_fp16", b"\0" + chance.randbytes(300_000)),
        "bundle_head": given.bundle(root, "head_fp16", b"\0" + chance.randbytes(200_000)),
        "tables_0": given.tables(root, given.digest(checkpoint)),
    }
    folder = given.build_package(root, inputs, given.package_params())
    parts = {
        "checkpoint": checkpoint,
        "folder_macos": folder,
        "gate_numbers": given.gate(root, "numbers"),
        "gate_device": given.gate(root, "device", "not_run", "needs a phone"),
    }
    return given.build_release(root, parts, given.release_params())


@pytest.fixture
def release(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "release"))


@pytest.fixture
def hub(tmp_path):
    with fake.Hub(tmp_path / "hub") as running:
        yield running


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))


@pytest.fixture
def over_lfs(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


def upload(release, hub, token=fake.TOKEN):
    return publish.upload(publish_check.check(release, token), REPOSITORY, HfApi(hub.url, token=token))


def refusal(release, hub, token=fake.TOKEN):
    with pytest.raises(UserError) as refused:
        upload(release, hub, token)
    assert token not in str(refused.value)
    return str(refused.value)


def files_of(release):
    return {p.relative_to(release).as_posix(): p for p in release.rglob("*") if p.is_file()}


def large_files(release):
    return {path for path in files_of(release) if path.endswith((".mlirb", ".i8"))}


def edit(release, path, content):
    """Put other content into a listed file, with all records made anew, as if the release had been built so."""
    write_atomic(release / path, content)
    return edit_record(release, lambda document: None)


def edit_record(release, change):
    document = seal.open_sealed((release / "release.json").read_bytes())
    for entry in document["files"]:
        file = release / entry["path"]
        entry |= {"sha256": sha256_file(file), "size": file.stat().st_size}
    change(document)
    text = seal.sealed_text(document)
    digests = {entry["path"]: entry["sha256"] for entry in document["files"]}
    digests["release.json"] = sha256_text(text)
    write_atomic(release / "release.json", text)
    write_atomic(release / "SHA256SUMS", sums.format_sums(digests))
    if (release / statement.STATEMENT).is_file():
        write_atomic(release / statement.STATEMENT, statement.statement_text(document, digests))
    return release


def check_head(release, hub, commits):
    """The repository's head holds exactly the release, byte for byte, after so many commits of ours."""
    history = hub.repositories[REPOSITORY]
    assert len(history) == 1 + commits  # the first one made the repository
    remote = {path: file for path, file in history[-1].files.items() if path != ".gitattributes"}
    assert remote.keys() == files_of(release).keys()
    for path, file in files_of(release).items():
        content = file.read_bytes()
        if path in large_files(release):
            assert remote[path]["lfs"]["oid"] == hashlib.sha256(content).hexdigest()
        else:
            assert remote[path] == fake.blob(content)
    return history[-1].oid


@pytest.mark.parametrize("transfer", ["xet", "lfs"])
def test_a_release_becomes_one_commit_that_holds_exactly_it(built, hub, transfer, request):
    if transfer == "lfs":
        request.getfixturevalue("over_lfs")
    commit = upload(built, hub)
    assert commit == check_head(built, hub, commits=1)
    assert upload(built, hub) == commit  # nothing new: no empty commit
    check_head(built, hub, commits=1)
    assert hub.count("PUT /storage/") == (len(large_files(built)) if transfer == "lfs" else 0)


def test_an_update_sends_what_is_new_and_leaves_other_files_alone(release, hub, over_lfs, capsys):
    first = upload(release, hub)
    other = hub.repositories[REPOSITORY][-1].files
    other["old/notes.txt"] = fake.blob(b"mine")
    edit(release, "macos/tiny_core.aimodel/main.mlirb", b"\0" + bytes(500))
    sent = hub.count("PUT /storage/")
    second = upload(release, hub)
    assert second != first and hub.count("PUT /storage/") == sent + 1
    assert hub.repositories[REPOSITORY][-1].files["old/notes.txt"] == fake.blob(b"mine")
    assert "1 other files stay" in (said := capsys.readouterr().err) and "old/notes.txt" in said


def test_an_upload_that_fails_half_way_goes_on_where_it_was(built, hub, monkeypatch):
    monkeypatch.setattr(publish, "_GROUP_BYTES", 1)  # a group for each file
    hub.interfere = lambda method, path: 403 if hub.count("GET .*/xet-write-token") > 2 else None
    assert "run the same command again" in refusal(built, hub)
    assert len(hub.repositories[REPOSITORY]) == 1  # nothing is visible
    arrived = {path for path in large_files(built) if hub.has_large(sha256_file(built / path))}
    assert 0 < len(arrived) < len(large_files(built))
    stored = sorted(hub.storage.glob("xet/xorbs/xorbs/*"))
    hub.interfere = lambda method, path: None
    upload(built, hub)
    check_head(built, hub, commits=1)
    assert set(stored) <= set(hub.storage.glob("xet/xorbs/xorbs/*"))
    content = sum(
        path.stat().st_size for path in hub.storage.glob("xet/xorbs/xorbs/*") if path.suffix != ".tagset"
    )
    assert content < 1.1 * sum(
        (built / path).stat().st_size for path in large_files(built)
    )  # nothing came twice


def command(release, hub, *options, token=fake.TOKEN, **environment):
    """Arguments of a process that publishes, with the environment that a user would have."""
    home = hub.storage.parent / "home"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    given_token = {"HF_TOKEN": token} if token else {}
    environment = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), **given_token, **environment}
    arguments = [
        sys.executable,
        "-m",
        "workflow_scripts",
        "publish",
        str(release),
        "--repo",
        REPOSITORY,
        *options,
    ]
    return {"args": arguments, "env": environment, "cwd": ROOT, "text": True}


def run(*arguments, **environment):
    done = subprocess.run(**command(*arguments, **environment), capture_output=True, check=False)
    assert fake.TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
    return done


def test_a_killed_upload_is_resumed_by_the_same_command(built, hub):
    puts, held, killed = itertools.count(), threading.Event(), threading.Event()

    def one_only(method, path):
        if method != "PUT" or next(puts) == 0:
            return None
        held.set()
        killed.wait(30)
        return 503

    hub.interfere = one_only
    options = command(built, hub, "--yes", HF_HUB_DISABLE_XET="1")
    process = subprocess.Popen(
        **options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert held.wait(30), process.communicate(timeout=5)
    while not hub.large:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    killed.set()
    assert len(hub.repositories[REPOSITORY]) == 1  # nothing is visible
    hub.interfere = lambda method, path: None
    arrived, before = set(hub.large), len(hub.requests)
    done = run(built, hub, "--yes", HF_HUB_DISABLE_XET="1")
    assert done.returncode == 0, done.stderr
    assert f"pinned commit: {check_head(built, hub, commits=1)}\n" in done.stdout
    sent = {request.rpartition("/")[2] for request in hub.requests[before:] if request.startswith("PUT")}
    # The killed client's last upload may still reach the server after `arrived` was read.
    assert arrived and not sent & arrived


def test_a_dry_run_asks_the_hub_nothing_and_needs_no_token(built, hub):
    done = run(built, hub, token=None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(files_of(built))} files, ") and "dry run" in done.stdout
    assert hub.requests == []
    without = run(built, hub, "--yes", token=None)
    assert without.returncode == 1 and "set HF_TOKEN" in without.stderr
    assert hub.requests == []


def test_a_refused_token_is_one_clear_line(built, hub):
    wrong = "hf_" + "Wrong" * 7
    done = run(built, hub, "--yes", token=wrong)
    assert done.returncode == 1 and wrong not in done.stdout + done.stderr
    assert re.fullmatch(r"error: .* the Hub refuses the access token: .* HF_TOKEN .*\n", done.stderr)
    assert not hub.repositories


@pytest.mark.parametrize(
    "place, status, said",
    [
        ("GET /api/whoami-v2", 401, "refuses the access token"),
        ("POST /api/models/.*/preupload", 401, "refuses the access token"),
        ("POST .*/objects/batch", 403, "may not write"),
        ("POST /api/models/.*/commit", 403, "may not write"),
        ("POST /api/models/.*/commit", 500, "HTTP 500"),
        ("GET /api/models/[^/]*/[^/]*$", 404, "no such repository"),
    ],
)
def test_refusals_half_way_say_what_to_do_and_change_nothing(built, hub, over_lfs, place, status, said):
    hub.interfere = lambda method, path: status if re.match(place, f"{method} {path}") else None
    assert said in refusal(built, hub)  # and not the token, which the server put into its answer
    assert all(len(history) == 1 for history in hub.repositories.values())


def test_a_token_that_may_only_read_is_refused_before_anything_is_made(built, hub):
    hub.role = "read"
    assert "may only read" in refusal(built, hub)
    assert not hub.repositories


def test_a_card_that_the_hub_refuses_is_told_before_anything_is_sent(release, hub):
    edit(release, "README.md", "---\nlicense: my-own\n---\n# A card\n")
    assert 'head of README.md ("license" must be one of' in refusal(release, hub)
    assert not hub.repositories and hub.count("POST .*preupload") == 0


def test_a_hub_that_is_not_there(built, tmp_path):
    with fake.Hub(tmp_path / "gone") as gone:
        pass
    assert "connection failed" in refusal(built, gone)


def test_a_commit_of_somebody_else_meanwhile_is_not_overwritten(built, hub):
    def meddle(method, path):
        if path == "/api/validate-yaml" and REPOSITORY in hub.repositories:  # the last step before the commit
            history = hub.repositories[REPOSITORY]
            history.append(fake.Commit({**history[-1].files, "theirs": fake.blob(b"x")}, history[-1].oid))

    hub.interfere = meddle
    assert "somebody else committed" in refusal(built, hub)
    assert len(hub.repositories[REPOSITORY]) == 2


def test_what_the_repository_ignores_is_not_silently_left_out(built, hub):
    hub.ignored = {"macos/gemma4_plan.json"}
    assert "lacks macos/gemma4_plan.json" in refusal(built, hub)


def test_a_file_that_changes_during_the_upload_is_noticed(release, hub):
    plan = release / "macos/gemma4_plan.json"

    def edit_it(method, path):
        if path == "/api/repos/create":
            plan.write_text("{}")

    hub.interfere = edit_it
    assert "macos/gemma4_plan.json changed while" in refusal(release, hub)
    assert len(hub.repositories[REPOSITORY]) == 1


def test_only_a_whole_release_is_published(release):
    (release / "macos/notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"macos/notes.txt: not part of the release"):
        publish_check.check(release)
    (release / "macos/notes.txt").unlink()
    (release / "macos/gemma4_plan.json").write_text("{}")
    with pytest.raises(UserError, match=r"macos/gemma4_plan.json: altered"):
        publish_check.check(release)


@pytest.mark.parametrize(
    "gate, change, said",
    [
        ("numbers", {"verdict": "not_run"}, "`numbers` on tiny_core.aimodel: not_run"),
        ("numbers", {"verdict": "fail"}, "`numbers` on tiny_core.aimodel: fail"),
        ("device", {"verdict": "fail"}, "`device` on tiny_core.aimodel: fail"),
        ("numbers", {"required": False}, "no required gate"),
    ],
)
def test_only_a_release_that_passed_is_published(release, gate, change, said):
    edit_record(release, lambda document: document["gates"][gate].update(change))
    with pytest.raises(UserError, match=re.escape(said)):
        publish_check.check(release)


def test_random_weights_are_not_published(release):
    edit_record(release, lambda document: document["checkpoint"].update(origin={"kind": "rehearsal"}))
    with pytest.raises(UserError, match="weights are random"):
        publish_check.check(release)


SECRETS = ["hf_" + "aB3" * 11, "ghp_" + "x1" * 18, "-----BEGIN RSA PRIVATE KEY-----"]
PATHS = [
    "/home/somebody/models/gemma",
    "/Users/me/dev/gemma",
    "/private/var/folders/xy/T/",
    "file:///data/x/",
    r"C:\Users\me",
    str(ROOT / "results"),
]


@pytest.mark.parametrize("text", [*PATHS, *SECRETS])
def test_nothing_of_one_machine_or_person_is_published(release, text):
    edit(release, "macos/gemma4_plan.json", json.dumps({"note": f"made in {text} today"}))
    with pytest.raises(UserError, match=r"macos/gemma4_plan.json holds") as refused:
        publish_check.check(release)
    shown = str(refused.value)
    assert ("token or a private key" in shown) == (text in SECRETS)
    assert text not in shown or text in PATHS


def test_the_users_own_token_is_found_whatever_it_looks_like(release):
    edit(release, "macos/gemma4_plan.json", '{"note": "open sesame"}')
    publish_check.check(release)
    with pytest.raises(UserError, match="access token"):
        publish_check.check(release, "open sesame")


@pytest.mark.parametrize(
    "text", ['"/home/user": 5, "/tmp/": 6', "https://x.org/home/a/b", "hf_model_id", "(/root)"]
)
def test_words_of_a_vocabulary_are_no_paths(release, text):
    edit(release, "macos/gemma4_plan.json", text)
    publish_check.check(release)


def test_a_secret_is_found_across_the_blocks_of_a_long_text(release, monkeypatch):
    monkeypatch.setattr(publish_check, "_HEAD", 64)
    monkeypatch.setattr(publish_check, "_BLOCK", 64)
    monkeypatch.setattr(publish_check, "_OVERLAP", 48)
    for start in range(0, 140, 11):
        edit(release, "macos/gemma4_plan.json", "é" + "." * start + " " + SECRETS[0] + " " + "." * 100)
        with pytest.raises(UserError, match="access token"):
            publish_check.check(release)
