"""`why`: what it announces is what a run then does, and it names the ingredient."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import ROOT, TINY
from workflow_scripts import closure, files, manifest, why
from workflow_scripts.errors import UserError
from workflow_scripts.stages import runner
from workflow_scripts.store.levels import Store
from workflow_scripts.store.local import LocalStore

PARAMS = {"source": str(TINY), "allow_moving_revision": False, "sha256": {}, "num_hidden_layers": 10}
TARGET = f"results/gemma-4-tiny/tables/gemma4_gather_raw{manifest.SUFFIX}"


# --- through Snakemake -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout of its own, whose sources a test may edit, with the tables built."""
    folder = tmp_path_factory.mktemp("check out")
    for name in ("config", "rules", "profiles", "workflow_scripts", "resources/gemma-4-tiny", "envs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Snakefile", folder)
    assert snakemake(folder).count("built: ") == 2
    return folder


def call(folder, *arguments):
    environment = os.environ | {"GEMMA4_STORE": str(folder / "store"), "PYTHONPATH": str(folder)}
    run = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def snakemake(folder):
    return call(folder, "snakemake", "--cores", "1", TARGET)


def ask(folder):
    """Result -> (state, reasons)."""
    table, _, summary = call(folder, "workflow_scripts", "why", TARGET).partition("\n\n")
    assert summary.startswith("2 results: ")
    rows = [re.split(r" {2,}", line) for line in table.splitlines()[1:]]
    return {row[0]: tuple(row[1:]) for row in rows if row[0]}


def listing(folder):
    """Every file with its stamp."""
    return {
        path: files.file_stamp(path)
        for part in ("results", "store")
        for path in files.tree_files(folder / part)
    }


def test_a_comment_is_announced_and_its_ripple_stops_at_equal_bytes(project):
    """Early cutoff: the stage runs again, its result is the same, so what reads it comes from the store."""
    source = project / "workflow_scripts/checkpoint/fetch.py"
    before, text = listing(project), source.read_text()
    source.write_text(f"{text}\n# a comment\n")
    assert ask(project) == {
        "checkpoint/text": ("rebuild", "source workflow_scripts/checkpoint/fetch.py: changed"),
        "tables/gemma4_gather_raw": ("depends on", "checkpoint/text"),
    }
    assert listing(project) == before
    said = snakemake(project)
    assert re.search(r"text: built: ", said) and re.search(r"gather_raw: from the store: ", said)
    source.write_text(text)
    assert ask(project) == {
        "checkpoint/text": ("from the store", "source workflow_scripts/checkpoint/fetch.py: changed"),
        "tables/gemma4_gather_raw": ("up to date",),
    }


def test_a_target_that_is_not_there_is_said_in_snakemakes_words():
    with pytest.raises(UserError, match="nonsense"):
        why.stage_commands("nonsense", [])


# --- reasons ---------------------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path):
    """checkpoint -> tables as commands, both built and stored."""
    store = Store(LocalStore(tmp_path / "store"), None)
    home = tmp_path / "results" / "model"
    text = home / "checkpoint" / f"text{manifest.SUFFIX}"
    commands = [
        why.Command("checkpoint", {"source": TINY}, PARAMS, text, store),
        why.Command("tables", {"checkpoint": text}, {}, home / "tables" / f"t{manifest.SUFFIX}", store),
    ]
    for command in commands:
        runner.execute(command.stage, command.inputs, command.params, command.output, store)
    return commands


def states(commands):
    return [(answer.state, *answer.reasons) for answer in why.explain(commands)]


def test_nothing_to_do(chain):
    assert states(chain) == [("up to date",), ("up to date",)]


def test_never_built_but_stored(chain):
    for command in chain:
        command.output.unlink()
    assert states(chain) == [("from the store", "never built"), ("from the store", "never built")]


def test_never_built_at_all(chain):
    nowhere = [replace(command, store=None) for command in chain]
    for command in chain:
        command.output.unlink()
    first, second = states(nowhere)
    assert first == ("rebuild", "never built")
    assert second[0] == "depends on" and second[1].endswith("text") and second[2] == "never built"


def test_a_parameter_shows_old_and_new(chain):
    changed = replace(chain[0], params=PARAMS | {"num_hidden_layers": 12, "sha256": {"config.json": "00"}})
    (state, *reasons), _ = states([changed, chain[1]])
    assert state == "rebuild"
    assert "parameter num_hidden_layers: 10 -> 12" in reasons
    assert 'parameter sha256.config.json: added ("00")' in reasons


def test_a_damaged_result_is_not_up_to_date(chain):
    (manifest.tree_path(chain[1].output) / "meta.json").write_text("{}")
    assert states(chain)[0] == ("up to date",)
    state, reason = states(chain)[1]
    assert state == "from the store" and "meta.json" in reason and "bytes changed" in reason


def test_a_lost_input_is_named(chain, tmp_path):
    lost = replace(chain[0], inputs={"source": tmp_path / "lost"})
    assert states([lost])[0][0] == "rebuild" and "lost does not exist" in states([lost])[0][1]


def test_an_edited_source_tool_and_input_are_named(chain, monkeypatch):
    code, tools = closure.stage_code, closure.stage_tools
    monkeypatch.setattr(closure, "stage_code", lambda stage: code(stage) | {"workflow_scripts/new.py": "0"})
    monkeypatch.setattr(closure, "stage_tools", lambda stage: tools(stage) | {"numpy": "9.9"})
    _, (state, *reasons) = states(chain)
    numpy = tools("tables")["numpy"]
    assert state == "depends on"
    assert reasons[1:] == ["source workflow_scripts/new.py: added", f"tool numpy: {numpy} -> 9.9"]


def test_every_kind_of_difference_has_its_line():
    old = manifest.Ingredients(
        "s",
        "a",
        {"a.py": "0", "b.py": "0"},
        {"x": [1, 2], "y": None},
        {"in": "0"},
        {"t": "1"},
        {"python": "3.11"},
    )
    new = replace(
        old, code={"a.py": "1"}, params={"x": [1, 3]}, inputs={"in": "1", "more": "2"}, tools={"t": "2"}
    )
    assert why.differences(old, new) == [
        "source a.py: changed",
        "source b.py: removed",
        "parameter x.1: 2 -> 3",
        "parameter y: removed (was null)",
        "input in: changed",
        "input more: added",
        "tool t: 1 -> 2",
    ]
    assert why.differences(new, old)[-3:] == ["input in: changed", "input more: removed", "tool t: 2 -> 1"]
    assert why.differences(old, old) == []
