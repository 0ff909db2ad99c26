"""The catalogue of mutants fits the sources; a mutant is caught only where its own gate fails, and says why."""

import ast
from dataclasses import replace

import pytest

from workflow_scripts.checks import mutants
from workflow_scripts.checks.mutant_catalogue import LAYERS, by_name, layer_of
from workflow_scripts.checks.mutant_catalogue.mutant import NEXT_RUN, TINY, VERIFY, Edit, Mutant
from workflow_scripts.checks.mutant_judgement import (
    BROKEN,
    CAUGHT,
    NOT_ALONE,
    OTHER_GATE,
    OTHER_REASON,
    SURVIVED,
    Failure,
    Outcome,
    judge,
    only_catchers,
)
from workflow_scripts.checks.mutant_run import apply
from workflow_scripts.closure import ROOT
from workflow_scripts.config import read_config
from workflow_scripts.errors import UserError

ALL = [mutant for layer in LAYERS.values() for mutant in layer]
AT_LEAST = 44


def config_of(mutant: Mutant):
    return read_config([] if mutant.config == TINY else [ROOT / mutant.config])


# --- the catalogue ------------------------------------------------------------------------------------------------


def test_there_are_enough_mutants_and_their_names_differ():
    assert len(ALL) >= AT_LEAST and len(by_name()) == len(ALL)
    assert len({mutant.fault for mutant in ALL}) == len(ALL)
    assert {"model", "quantization", "export", "kernels", "tables", "packaging"} == LAYERS.keys()


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_every_edit_applies_once_to_the_present_sources(mutant):
    assert mutant.edits or mutant.damage
    for edit in mutant.edits:
        source = (ROOT / edit.file).read_text(encoding="utf-8")
        assert source.count(edit.old) == 1, edit
        assert edit.old != edit.new
        if edit.file.endswith(".py"):
            ast.parse(source.replace(edit.old, edit.new))


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_every_mutant_names_a_gate_and_a_target_that_exist(mutant):
    config = config_of(mutant)
    targets = {artifact.published for artifact in config.artifacts.values()}
    targets |= {*config.folders, *config.recipes(), "release", "folders"}
    if mutant.is_gate:
        assert mutant.caught_by in config.gates.required
    elif mutant.caught_by.startswith("stage "):
        stage = mutant.caught_by.removeprefix("stage ")
        assert (ROOT / f"workflow_scripts/stages/{stage}.py").is_file()
    else:
        assert mutant.caught_by in (VERIFY, NEXT_RUN) and mutant.damage
    if mutant.caught_by == NEXT_RUN:
        assert mutant.target.partition("/")[2] in targets
    else:
        assert any(mutant.target == name or name.endswith(f"/{mutant.target}") for name in targets)


def test_every_required_gate_has_a_mutant_that_it_alone_is_to_catch():
    alone = {mutant.caught_by for mutant in ALL if mutant.alone}
    assert set(read_config([]).gates.required) <= alone


def test_layers_and_names_are_found_and_unknown_ones_refused():
    assert layer_of("norm_eps") == "model"
    assert mutants.chosen(["tables"], []) == list(LAYERS["tables"])
    assert mutants.chosen([], ["norm_eps"]) == [by_name()["norm_eps"]]
    assert mutants.chosen([], []) == ALL
    with pytest.raises(UserError, match="no mutant or layer bogus"):
        mutants.chosen(["bogus"], [])


def test_an_edit_that_does_not_apply_once_is_refused(tmp_path):
    path = tmp_path / "code.py"
    path.write_text("one\ntwo\ntwo\n")
    apply(Edit("code.py", "one", "three"), tmp_path)
    assert path.read_text() == "three\ntwo\ntwo\n"
    for old in ("two", "one"):
        with pytest.raises(UserError, match=r"code\.py has \d times, not once"):
            apply(Edit("code.py", old, "four"), tmp_path)


# --- the judgement ------------------------------------------------------------------------------------------------

MUTANT = Mutant("m", "a fault", "numbers", "core", (Edit("a", "b", "c"),), check="logits")
ALONE = replace(MUTANT, alone=True)
RIGHT = Failure("numbers", "core", "france: logits: expected <= 1, found 2")
OTHER = Failure("structure", "core", "interface: expected 3, found 4")


def word(mutant, failures, crashes=(), refusal=""):
    return judge(mutant, Outcome("m", 1.0, tuple(failures), tuple(crashes), refusal)).word


def test_caught_is_what_its_gate_fails_over_its_target_for_its_reason():
    assert word(MUTANT, [RIGHT]) == CAUGHT
    assert word(MUTANT, [OTHER, RIGHT]) == CAUGHT
    assert word(MUTANT, []) == SURVIVED
    assert word(MUTANT, [OTHER]) == OTHER_GATE
    assert word(MUTANT, [replace(RIGHT, target="head")]) == OTHER_GATE
    assert word(MUTANT, [replace(RIGHT, reason="the target is read and runs")]) == OTHER_REASON


def test_a_crash_of_a_stage_catches_nothing():
    assert word(MUTANT, [RIGHT], ["export core: TypeError"]) == BROKEN


def test_a_gate_catches_alone_where_nothing_else_failed_and_the_release_ships_without_it():
    assert word(ALONE, [RIGHT]) == CAUGHT
    assert word(ALONE, [RIGHT, OTHER]) == NOT_ALONE
    assert word(ALONE, [RIGHT], refusal="gate tokens failed") == NOT_ALONE


def test_the_run_passes_only_where_all_are_caught_and_every_gate_is_the_only_one_for_some():
    caught, lost = (judge(ALONE, Outcome("m", 1.0, found)) for found in ((RIGHT,), ()))
    assert mutants.passed([ALONE], {"m": caught}, ["numbers"])
    assert not mutants.passed([ALONE], {"m": lost}, ["numbers"])
    assert not mutants.passed([ALONE], {"m": caught}, ["numbers", "tables"])
    assert only_catchers([ALONE, MUTANT], {"m": caught}, ["numbers", "tables"]) == {
        "numbers": ["m"],
        "tables": [],
    }


def test_the_report_tells_what_survived_and_which_gate_stands_for_nothing(monkeypatch):
    monkeypatch.setattr(mutants, "layer_of", lambda name: "model")
    outcome = Outcome("m", 1.0, ())
    text = "\n".join(mutants.report([MUTANT], {"m": judge(MUTANT, outcome)}, {"m": outcome}, ["tables"]))
    assert "SURVIVED (not numbers)" in text
    assert "tables             NONE" in text
    assert [line.split() for line in text.splitlines() if line.startswith("all")] == [["all", "0", "1"]]
