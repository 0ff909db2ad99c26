"""The doctor tells what is there, what is missing and what to do, and never a secret."""

import os
import stat

import pytest

from workflow_scripts import doctor


def by_subject(findings):
    return {finding.subject: finding for finding in findings}


def test_this_environment_is_ready(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert printed.endswith("ready\n")


def test_every_pin_has_a_row():
    pins = doctor.read_pins(doctor.PINS)
    assert {"torch", "coreai-core", "snakemake"} <= pins.keys()
    assert pins.keys() <= by_subject(doctor.examine(os.environ)).keys()


def test_a_build_tag_is_no_difference(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert [finding.status for finding in doctor.packages({"torch": "2.13.0"})] == ["ok"]
    assert [finding.status for finding in doctor.packages({"torch": "2.13.1"})] == ["missing"]


def test_wrong_and_absent_packages_are_missing(monkeypatch, tmp_path, capsys):
    pins = tmp_path / "requirements.txt"
    pins.write_text("# a comment\npytest==0.0.1\nno-such-package==2.0\n")
    monkeypatch.setattr(doctor, "PINS", pins)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "installed, 0.0.1 is pinned" in printed
    assert "not installed, 2.0 is pinned" in printed
    assert printed.count("make environment") == 1
    assert "not ready: pytest, no-such-package" in printed


def test_no_compiler_is_missing_and_xcode_only_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = by_subject(doctor.examine({}))
    assert found["C++ compiler"].status == "missing"
    assert "g++" in found["C++ compiler"].advice
    assert found["xcrun coreai-build"].status == "warn"
    assert "Mac" in found["xcrun coreai-build"].advice
    assert found["git"].status == "warn"


@pytest.mark.parametrize(("script", "status"), [("echo coreai-build 27.1", "ok"), ("exit 72", "warn")])
def test_xcode_without_coreai_build_is_told_apart(monkeypatch, tmp_path, script, status):
    tool = tmp_path / "xcrun"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = by_subject(doctor.examine(os.environ))["xcrun coreai-build"]
    assert finding.status == status
    assert finding.found == ("coreai-build 27.1" if status == "ok" else "this Xcode has none")


def test_the_token_is_seen_but_never_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert "none" in by_subject(doctor.examine(os.environ))["Hugging Face token"].found
    (tmp_path / "token").write_text("hf_secret_in_file")
    assert by_subject(doctor.examine(os.environ))["Hugging Face token"].found == "present"
    monkeypatch.setenv("HF_TOKEN", "hf_secret_in_environment")
    doctor.main([])
    printed = capsys.readouterr().out
    assert "present" in printed
    assert "secret" not in printed


def test_an_unwritable_cache_is_told(tmp_path):
    file = tmp_path / "file"
    file.touch()
    finding = by_subject(doctor.examine({"HF_HOME": str(file)}))["Hugging Face cache"]
    assert finding.status == "warn"
    assert "HF_HOME" in finding.advice


@pytest.mark.parametrize(("size", "status"), [(1e9, "missing"), (8e9, "warn"), (64e9, "ok")])
def test_memory_is_judged_by_what_models_need(size, status):
    assert doctor._memory(int(size)).status == status


def test_other_systems_and_pythons_are_refused():
    assert doctor._system("Windows", "AMD64").status == "missing"
    assert doctor._system("Darwin", "arm64").status == "ok"
    assert [doctor._python(v).status for v in [(3, 10, 1), (3, 11, 0), (3, 15, 0)]] == [
        "missing",
        "ok",
        "missing",
    ]
