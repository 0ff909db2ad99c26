"""The whole way in a clean clone: checkpoint to release, then what a person does with the release folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fakes import hub as fake
from workflow_scripts.checks.clone import copy_project

pytestmark = pytest.mark.end_to_end
FRANCE = "What is the capital of France?"
PIPELINED = tuple(f"gpu-pipelined/gemma4_tiny_decode_int4lin{form}" for form in ("", "_tbl", "_tbl_ring"))
CHATS = ("macos", "ios-gpu", "ios-ane", *PIPELINED)
KERNELS = ("macos", "ios-gpu")
AHEAD = (
    *(f"{folder}_aotc_h18p" for folder in PIPELINED[1:]),
    *(f"ios-gpu/gemma4_tiny_{stem}_aotc_h18p" for stem in ("metal_int4km_L10", "head_argmax_int4km")),
)
WITH_XCRUN = {"PATH": os.pathsep.join([str(ROOT / "tests/fakes"), os.environ["PATH"]]), "FAKE_XCRUN": "ok"}


def run(command, folder, **more):
    """A command in a clone, with the store that all clones of this test share, and more of an environment."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # A check that has just built the release lends its store, so that it is not built twice.
    store = {"GEMMA4_STORE": os.environ.get("GEMMA4_CHECK_STORE") or str(folder.parent / "store")}
    return subprocess.run(command, cwd=folder, env=environment | store | more, capture_output=True, text=True)


def snakemake(folder, *arguments):
    return run([sys.executable, "-m", "snakemake", *arguments], folder)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what git would check out, at a path with a space and an umlaut, with a finished release."""
    folder = tmp_path_factory.mktemp("clones") / "a clöne"
    copy_project(folder)
    built = snakemake(folder, "-j2", "release")
    assert built.returncode == 0, built.stderr[-5000:]
    (folder / "build.log").write_text(built.stdout + built.stderr)
    return folder


@pytest.fixture(scope="module")
def release(clone):
    return clone / "results/gemma-4-tiny/release"


def test_the_folders_hold_what_they_promise(release):
    found = sorted(path.relative_to(release).as_posix() for path in release.glob("*/*"))
    assert found == [
        *PIPELINED,
        "ios-ane/gemma4_chunks_plan.json",
        "ios-ane/gemma4_plan.json",
        "ios-ane/gemma4_tiny_head_argmax_int8.aimodel",
        "ios-ane/gemma4_tiny_hostcache_chunk1_int8.aimodel",
        "ios-ane/gemma4_tiny_hostcache_chunk2_int8.aimodel",
        "ios-ane/gemma4_tiny_hostcache_chunk3_int8.aimodel",
        "ios-ane/provenance.json",
        "ios-ane/tokenizer",
        "ios-frontend/gemma4_gather_raw",
        "ios-frontend/provenance.json",
        "ios-gpu/gemma4_plan.json",
        "ios-gpu/gemma4_tiny_head_argmax_int4km.aimodel",
        "ios-gpu/gemma4_tiny_metal_int4km_L10.aimodel",
        "ios-gpu/provenance.json",
        "ios-gpu/tokenizer",
        "macos/gemma4_plan.json",
        "macos/gemma4_tiny_frontend_int8.aimodel",
        "macos/gemma4_tiny_head_argmax_kernel.aimodel",
        "macos/gemma4_tiny_metal_int8v3_L10.aimodel",
        "macos/provenance.json",
        "macos/tokenizer",
    ]
    for folder in CHATS:
        assert {path.name for path in (release / folder / "tokenizer").iterdir()} == {
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        }
    assert len(list((release / "ios-frontend/gemma4_gather_raw").iterdir())) == 7
    for folder in PIPELINED:
        stem = Path(folder).name
        assert {path.name for path in (release / folder).iterdir()} == {
            *("metadata.json", f"{stem}.aimodel", "tokenizer", "gemma4_plan.json", "provenance.json"),
        }
        assert json.loads((release / folder / "metadata.json").read_text())["name"] == stem


def test_every_required_gate_passed_and_is_on_record(release):
    gates = json.loads((release / "release.json").read_text())["gates"]
    required = [gate for gate in gates.values() if gate["required"]]
    assert {gate["gate"] for gate in required} == {
        *("structure", "numbers", "kernels", "ane", "quantization", "tables", "chunks", "fp16", "tokens"),
        *("long_run", "chat", "agreement"),
    }
    assert {gate["verdict"] for gate in required} == {"pass"}
    assert {gate["target"] for gate in required if gate["gate"] == "kernels"} == {
        path.name
        for folder in KERNELS
        for path in release.glob(f"{folder}/*")
        if "_metal_" in path.name or "_argmax_" in path.name
    }
    assert {gate["target"] for gate in required if gate["gate"] == "ane"} == {
        path.name for path in release.glob("ios-ane/*.aimodel")
    }
    for folder in CHATS:
        tokens = gates[f"tokens_{folder}"]
        assert len(tokens["tokens"]["france"]) == 8
        judged = {check["name"] for check in tokens["checks"]}
        # The packaged tokenizer, on accents and an emoji, for everybody who types them.
        assert {"accents: prompt ids", "accents: text", "accents: tokens"} <= judged
    for folder in (*KERNELS, *PIPELINED):
        assert len(gates[f"long_run_{folder}"]["tokens"]["long"]) == 256
    left_out = {check["name"]: check["found"] for check in gates["tokens_ios-ane"]["checks"]}
    assert left_out["dialogues that fit"].endswith("chat not fed: longer than the 64 positions of this set")
    long = gates["long_run_ios-ane"]
    assert len(long["tokens"]["long"]) == 47  # its prompt has 18 tokens
    assert {check["name"]: check["found"] for check in long["checks"]}["long: positions fed"] == "64 of 273"
    agreed = {check["name"]: check["found"] for check in gates["agreement_folders"]["checks"]}
    assert agreed["long_run: long"].startswith("256 ids") and agreed["long_run: long"].endswith("6 folders")
    assert agreed["chat: two_turns, answer 2"].endswith("6 folders")
    assert agreed["tokens: chat"].endswith("5 folders")


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac runs it")
def test_a_gate_that_this_host_cannot_run_is_told_and_listed(clone, release):
    gates = json.loads((release / "release.json").read_text())["gates"]
    readme, said = (release / "README.md").read_text(), (clone / "build.log").read_text()
    for folder in KERNELS:
        gpu = gates[f"gpu_{folder}"]
        assert (gpu["verdict"], gpu["required"]) == ("not_run", False) and gpu["reason"]
        assert f"- `gpu_{folder}` on {folder}: {gpu['reason']}" in readme
        assert f"not run: gate gpu on {folder}: {gpu['reason']}" in said


def test_nothing_of_this_machine_is_in_the_release(clone, release):
    trace = re.compile(
        "|".join(map(re.escape, (str(clone), str(ROOT), str(Path.home()), sys.prefix))).encode()
    )
    for path in filter(Path.is_file, release.rglob("*")):
        assert not path.is_symlink()
        assert not trace.search(path.read_bytes()), path


def states(folder):
    """Every file and folder below, with what a write would change."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_chat_needs_the_folders_alone(clone, release, tmp_path):
    """The Mac's answers by itself, the phone's with the tables beside it; stdout is the reply and nothing else."""
    for folder in (*CHATS, "ios-frontend"):
        shutil.copytree(release / folder, tmp_path / folder)
    before = states(tmp_path / "macos")

    def chat(folder, prompt):
        return run(
            [sys.executable, "-m", "workflow_scripts", "chat", str(tmp_path / folder), "--prompt", prompt],
            clone,
        )

    hidden = {name: clone / name for name in ("results", "resources")}
    for name, path in hidden.items():
        path.rename(clone / f"{name}-moved-away")
    try:
        phone = chat("ios-gpu", FRANCE)
        engine = chat("ios-ane", FRANCE)
        pipelined = [chat(folder, FRANCE) for folder in PIPELINED]
        beyond = chat("ios-ane", "Tell me a long story about a lighthouse.")
        shutil.rmtree(tmp_path / "ios-frontend")
        alone = chat("ios-gpu", FRANCE)
        mac = chat("macos", FRANCE)
        accents = chat("macos", "Que veut dire « garçon » ? 🙂")
    finally:
        for name, path in hidden.items():
            (clone / f"{name}-moved-away").rename(path)
    for answered in (mac, phone, engine, *pipelined):
        reply = (answered.returncode, answered.stdout)
        assert reply == (0, "The capital of France is Paris.\n"), answered.stderr
    if sys.platform != "darwin":
        told = "gemma4_tiny_metal_int4km_L10.aimodel: 30 Metal kernels run as their reference operators"
        assert told in phone.stderr and "int8v3_L10.aimodel: 30 Metal kernels" in mac.stderr
    assert beyond.returncode == 1 and beyond.stdout == ""
    assert "the answer is not finished" in beyond.stderr
    assert "longer than the 64 positions the set was exported for" in beyond.stderr
    assert alone.returncode == 1 and alone.stdout == ""
    assert "folder `ios-frontend` of the same release" in alone.stderr
    assert states(tmp_path / "macos") == before  # so it may lie where nobody can write
    assert accents.stdout == "« Garçon » veut dire « boy », comme à l'école.\n"


def test_chat_from_no_folder_is_one_line(clone, tmp_path):
    asked = run([sys.executable, "-m", "workflow_scripts", "chat", str(tmp_path), "--prompt", FRANCE], clone)
    assert asked.returncode == 1 and asked.stdout == ""
    assert asked.stderr.startswith("error: ") and "Traceback" not in asked.stderr


def test_verify_names_the_flipped_file(clone, release, tmp_path):
    copy = shutil.copytree(release, tmp_path / "release")
    command = [sys.executable, "-m", "workflow_scripts", "verify", str(copy)]
    assert run(command, clone).returncode == 0
    victim = copy / "macos/gemma4_tiny_metal_int8v3_L10.aimodel/main.mlirb"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    checked = run(command, clone)
    assert checked.returncode == 1
    assert "macos/gemma4_tiny_metal_int8v3_L10.aimodel/main.mlirb" in checked.stdout + checked.stderr


def test_the_report_is_one_page_that_loads_nothing(clone):
    """Its captions and figures lie in it; a browser shows it without a network."""
    snakemake(clone, "report")
    page = (clone / "results/gemma-4-tiny/report.html").read_text(encoding="utf-8")
    for name in (
        "built.html",
        "gates.html",
        "errors.svg",
        "divergences.svg",
        "signal.svg",
        "sizes.svg",
        "jobs.svg",
    ):
        assert f"results/gemma-4-tiny/report/{name}" in page
    assert "at every position of the long" in page and "pages of mapped files come on top" in page
    loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(https?:[^\"' >]*)", page)
    assert not loaded and len(page) < 10_000_000


def test_a_second_run_has_nothing_to_do_even_after_a_touch(clone):
    for path in (*clone.glob("workflow_scripts/**/*.py"), *clone.glob("resources/gemma-4-tiny/*")):
        path.touch()
    again = snakemake(clone, "-j2", "release")
    assert again.returncode == 0
    assert "Nothing to be done" in again.stderr


def test_an_edit_reruns_the_stages_that_feel_it_and_no_other(clone):
    """A comment in the front end's authoring, which whole decoders share: their exports, and what is judged of them."""
    source = clone / "workflow_scripts/model/frontend.py"
    old = source.read_text()
    try:
        source.write_text(old + "# a comment\n")
        plan = snakemake(clone, "-n", "-j2", "release")
    finally:
        source.write_text(old)
    assert plan.returncode == 0
    counts = dict(re.findall(r"^(\w+) +(\d+)$", plan.stdout, re.M))
    assert (counts.get("export_frontend"), counts.get("export_form")) == ("1", "4")
    untouched = (
        "checkpoint",
        "oracle",
        "tables",
        "weights",
        "reference",
        "export_hostcache",
        "export_kernels",
    )
    assert not set(counts) & set(untouched)


def test_a_kernel_edit_reaches_its_own_bundles_only(clone):
    source = clone / "workflow_scripts/kernels/palette_matvec_int4.metal"
    old = source.read_text()
    try:
        source.write_text(old + "// a comment\n")
        plan = snakemake(clone, "-n", "-j2", "release").stdout
    finally:
        source.write_text(old)
    jobs = re.findall(r"^Job \d+: (.*)$", plan, re.M)
    assert {job for job in jobs if job.startswith("export")} == {
        "export: gemma4_tiny_metal_int4km_L10.aimodel",
        "export: gemma4_tiny_metal_int4km_L10_fp32.aimodel",
    }
    assert "package: ios-gpu" in jobs
    assert not [job for job in jobs if "macos" in job or "int8" in job or "head_argmax" in job]


def planned(clone, *arguments):
    """Messages of the jobs that a dry run lists."""
    plan = snakemake(clone, "-n", "-j2", "release", *arguments)
    assert plan.returncode == 0, plan.stderr[-3000:]
    return {*re.findall(r"^Job \d+: (.*)$", plan.stdout, re.M)}


def test_an_edit_of_the_engines_authoring_reaches_its_own_folder_only(clone):
    source = clone / "workflow_scripts/model/ane_layers.py"
    old = source.read_text()
    try:
        source.write_text(old + "# a comment\n")
        jobs = planned(clone)
    finally:
        source.write_text(old)
    assert {job for job in jobs if job.startswith("export")} == {
        f"export: gemma4_tiny_hostcache_{part}.aimodel"
        for part in ("chunk1_int8", "chunk2_int8", "chunk3_int8", "producers_int8_fp32", "readers_int8_fp32")
    }
    assert {"package: ios-ane", "gate fp16: ios-ane", "gate chat: ios-ane"} <= jobs
    assert not [job for job in jobs if "macos" in job or "ios-gpu" in job or "metal" in job]


def test_another_cut_rebuilds_the_chunks_it_touches(clone, tmp_path):
    """The border between the first two chunks; the third, the evidence and the head stay."""
    (tmp_path / "cut.yaml").write_text("artifacts: {chunk1: {layers: [0, 2]}, chunk2: {layers: [2, 5]}}")
    jobs = planned(clone, "--configfile", str(tmp_path / "cut.yaml"))
    assert {job for job in jobs if job.startswith("export")} == {
        f"export: gemma4_tiny_hostcache_chunk{number}_int8.aimodel" for number in (1, 2)
    }
    assert "gate chunks: ios-ane" in jobs
    assert not [job for job in jobs if "macos" in job or "chunk3" in job or "head_argmax" in job]


def test_a_wrong_config_stops_before_any_job(clone):
    wrong = snakemake(clone, "-n", "release", "--config", "contxt=5")
    assert wrong.returncode == 1
    said = wrong.stdout + wrong.stderr
    assert "contxt: unknown key" in said and "Did you mean context?" in said


@pytest.fixture(scope="module")
def mac(clone, release):
    """A second clone on a host with Apple's compiler, or its stand-in, and the store of the first; the release there.

    Early cutoff on top: a comment in the tables' writer, whose output stays equal, reaches no export.
    """
    second = clone.parent / "second"
    copy_project(second)
    source = second / "workflow_scripts/tables/writer.py"
    source.write_text(source.read_text() + "# a comment\n")
    built = run([sys.executable, "-m", "snakemake", "-j2", "aot", "release"], second, **WITH_XCRUN)
    assert built.returncode == 0, built.stderr[-3000:]
    return second


def test_a_second_host_adds_what_is_compiled_and_repeats_nothing(clone, release, mac):
    logs = {path: path.read_text() for path in (mac / "results/gemma-4-tiny/logs").rglob("*.log")}
    made = {path.parent.name for path, text in logs.items() if "from the store; digest" not in text}
    # The checkpoint's large file has a writable name of its own, so it may be placed anew; it costs a second.
    assert made - {"checkpoint"} <= {"tables", "aot", "ios-gpu", "gpu-pipelined", "gpu", "release"}
    again = [path.stem for path, text in logs.items() if "from the store; digest" not in text]
    assert {name for name in again if "_aotc_" not in name} - {"text"} <= {
        *("gemma4_gather_raw", "macos", "ios-gpu", "release"),  # two of them gates that need a Mac
    }
    finished = mac / "results/gemma-4-tiny/release"
    sums = [
        dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())
        for folder in (release, finished)
    ]
    changed = {name for name in sums[0] if sums[1].get(name) != sums[0][name]}
    assert changed == {"release.json", "README.md", "catalog.json"}  # what lists the others
    added = {Path(name).parts[:2] for name in sums[1].keys() - sums[0].keys()}
    assert {"/".join(parts) for parts in added} == set(AHEAD)


def test_the_release_lists_what_is_compiled_ahead_of_time_or_why_it_is_not(clone, release, mac):
    finished = mac / "results/gemma-4-tiny/release"
    for folder, reason in ((release, "no xcrun on this host"), (finished, None)):
        listed = json.loads((folder / "release.json").read_text())["aot"]
        assert set(listed) == set(AHEAD) and {entry["not_built"] for entry in listed.values()} == {reason}
        readme = (folder / "README.md").read_text()
        assert all(name in readme for name in AHEAD)
        assert (f"not built: {reason}" in readme) == bool(reason)
    assert "not built: 4 bundles ahead of time: no xcrun on this host" in (clone / "build.log").read_text()
    for name in AHEAD:
        stem = Path(name).name.removesuffix("_aotc_h18p")
        assert (finished / name / f"{stem}.h18p.aimodelc" / "main-h18p.mlirb").is_file()
    assert run([sys.executable, "-m", "workflow_scripts", "verify", str(finished)], clone).returncode == 0


def test_a_compiler_that_dies_stops_the_run_with_its_message(mac):
    """Without the store; nothing that looks whole is left of the earlier result."""
    crash = WITH_XCRUN | {"FAKE_XCRUN": "crash", "GEMMA4_STORE": "off"}
    died = run([sys.executable, "-m", "snakemake", "-j2", "aot", "--forcerun", "compile_ahead"], mac, **crash)
    assert died.returncode == 1
    assert (
        "gemma4_tiny_decode_int4lin_tbl.aimodel for iOS h18p (gpu): coreai-build died by SIGSEGV"
        in died.stderr
    )
    assert not list((mac / "results/gemma-4-tiny/aot").glob("*.manifest.json"))


@pytest.mark.skipif(bool(shutil.which("xcrun")), reason="this host has the compiler")
def test_what_needs_the_compiler_stops_at_once_without_it(clone):
    start = time.monotonic()
    required = snakemake(clone, "-j2", "release", "--config", "aot={mode: require}")
    assert time.monotonic() - start < 5
    asked = snakemake(clone, "-n", "aot")
    for stopped in (required, asked):
        assert stopped.returncode == 1 and "no xcrun on this host" in stopped.stdout + stopped.stderr
    assert "aot.mode is `require`" in required.stderr and "xcodebuild -downloadComponent" in required.stderr


def test_the_release_is_published_by_its_target(clone, release, tmp_path, monkeypatch):
    """Where to is asked before anything is built; it is sent only when that is said."""
    without = snakemake(clone, "-j2", "publish")
    assert without.returncode == 1 and "repository=OWNER/NAME" in without.stdout + without.stderr
    log = clone / "results/gemma-4-tiny/logs/publish/release.log"
    with fake.Hub(tmp_path / "hub") as hub:
        for name in [name for name in os.environ if name.startswith("HF_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_TOKEN", fake.TOKEN)
        dry = snakemake(clone, "-j2", "publish", "--config", "repository=me/tiny")
        assert dry.returncode == 0 and "dry run: all checks passed" in dry.stdout, dry.stderr[-3000:]
        assert hub.requests == []
        sent = snakemake(clone, "-j2", "publish", "--config", "repository=me/tiny", "publish=yes")
        assert sent.returncode == 0, sent.stderr[-3000:]
        pinned = f"pinned commit: {hub.repositories['me/tiny'][-1].oid}\n"
        assert pinned in sent.stdout and pinned in log.read_text()
        assert fake.TOKEN not in sent.stdout + sent.stderr + log.read_text()


def test_why_names_the_edited_file(clone):
    source = clone / "workflow_scripts/model/frontend.py"
    text = source.read_text()
    try:
        source.write_text(text + "# a comment\n")
        why = run([sys.executable, "-m", "workflow_scripts", "why"], clone)
    finally:
        source.write_text(text)
    assert why.returncode == 0
    rebuilt = [line for line in why.stdout.splitlines() if " rebuild " in line]
    assert rebuilt and all("workflow_scripts/model/frontend.py: changed" in line for line in rebuilt)
    assert any("frontend_int8" in line for line in rebuilt)
    assert not any("hostcache" in line for line in rebuilt)
