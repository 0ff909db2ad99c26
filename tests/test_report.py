"""The summary and the report: made of a release's records and gates' figures, whatever is missing among them."""

import html
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import yaml

from workflow_scripts import manifest
from workflow_scripts.checks.clone import copy_project
from workflow_scripts.config import DEFAULT
from workflow_scripts.errors import UserError
from workflow_scripts.files import write_json
from workflow_scripts.gates.verdict import BY_POSITION, FOUND_BYTES, PREDICTED_BYTES, Verdict
from workflow_scripts.report import pages
from workflow_scripts.report.facts import Facts, Kind
from workflow_scripts.report.plots import PLOTS
from workflow_scripts.report.summary import gate_rows, shorten, summary

LOGITS = "france: logits against the recipe's reference"
NO_XCRUN = "no <xcrun> on this host"


def check(name, passed=True, expected="equal", found="equal"):
    return {"name": name, "passed": passed, "expected": expected, "found": found}


def gate(name, target, verdict="pass", bounds=None, checks=(), reason=None):
    return {
        "gate": name,
        "target": target,
        "verdict": verdict,
        "reason": reason,
        "required": verdict != "not_run",
        "bounds": bounds or {},
        "checks": list(checks),
    }


@pytest.fixture
def results(tmp_path):
    """A release with two gates that passed, one that was not run, and a recipe with noise."""
    entry = {"bytes": 2_500_000, "contents": ["t_core.aimodel"], "driver": "hostcache"}
    numbers = gate(
        "numbers", "t_core.aimodel", bounds={LOGITS: 0.5}, checks=[check(LOGITS, True, "<= 0.5", "within")]
    )
    size = "bytes of constants against prediction"
    release = {
        "model": "t",
        "slug": "t",
        "folders": {"macos": entry, "gpu-pipelined/t": entry | {"driver": "decode"}},
        "artifacts": {
            "t_core.aimodel": {"form": "core", "recipe": "int8-kmeans-g32", "compute": "fp16", "bytes": 9}
        },
        "recipes": {"int8-kmeans-g32": {"total": {"bits_per_weight": 8.5, "bytes": 9}}},
        "tools": {"torch": ["2.13.0"]},
        "checkpoint": {"digest": "abc"},
        "aot": {"macos/t_aotc": {"not_built": NO_XCRUN}},
        "gates": {
            "numbers_t_core.aimodel": numbers,
            "structure_t_core.aimodel": gate(
                "structure",
                "t_core.aimodel",
                bounds={size: 0.02},
                checks=[check(size, True, "<= 0.02", "within")],
            ),
            "gpu_macos": gate("gpu", "macos", "not_run", reason="this host has no Metal"),
        },
    }
    write_json(tmp_path / "release/release.json", release)
    folder = tmp_path / "gates/numbers/t_core.aimodel"
    write_json(folder / "measured.json", {LOGITS: 0.125})
    write_json(folder / BY_POSITION, {LOGITS: [0.1, 0.125, None]})
    write_json(
        tmp_path / "gates/structure/t_core.aimodel/measured.json",
        {size: 0.0, FOUND_BYTES: 2e6, PREDICTED_BYTES: 2e6},
    )
    tensors = {f"layers.{layer}.mlp.up_proj.weight": {"snr_db": 44.0 + layer} for layer in range(3)}
    tensors["layers.0.self_attn.q_proj.weight"] = {"snr_db": None}
    write_json(tmp_path / "weights/int8-kmeans-g32/report.json", {"tensors": tensors})
    return tmp_path


def edit(results, change):
    path = results / "release/release.json"
    release = json.loads(path.read_text())
    change(release)
    path.write_text(json.dumps(release))


def text_of(page):
    """What a reader sees of HTML, on one line."""
    return " ".join(html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)).split())


class Loads(HTMLParser):
    """Addresses that a page loads by itself."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.found.append(given["src"])
        if tag == "link" and given.get("href"):
            self.found.append(given["href"])


def test_the_summary_says_what_was_built_and_how_near_its_bounds_it_came(results):
    lines = [line.split() for line in summary(Facts.read(results)).splitlines()]
    assert ["macos", "2.5", "MB", "1", "hostcache"] in lines and ["all", "5.0", "MB"] in lines
    assert ["numbers", "1", "0", "0", "1", "0.250"] in [line[:6] for line in lines]
    assert ["gpu", "0", "1", "0", "0", "-", "-"] in lines
    assert lines[-1] == ["no", "job", "ran", "for", "this", "release:", "all", "came", "from", "the", "store"]


def test_what_was_not_done_is_told_with_its_reason(results):
    assert Facts.read(results).not_done() == [
        "gate gpu on macos: this host has no Metal",
        f"macos/t_aotc: {NO_XCRUN}",
    ]


@pytest.mark.parametrize(
    ("expected", "bound", "found", "used"),
    [
        ("<= 2", 2.0, 1.0, 0.5),
        (">= 2", 2.0, 8.0, 0.25),
        (">= 2", 2.0, 1.0, 2.0),
        ("<= 0", 0.0, 0.0, 0.0),
        ("<= 0", 0.0, 1.0, math.inf),
    ],
)
def test_the_used_share_of_a_bound_is_above_one_where_it_is_broken(results, expected, bound, found, used):
    edit(
        results,
        lambda release: release["gates"].update(
            x_y=gate("x", "y", bounds={"c": bound}, checks=[check("c", True, expected)])
        ),
    )
    write_json(results / "gates/x/y/measured.json", {"c": found})
    (judged,) = [gate for gate in Facts.read(results).gates if gate.gate == "x"]
    assert judged.checks[0].used == used


def test_pages_and_figures_are_written_and_show_names_as_text(results, tmp_path):
    out = tmp_path / "out"
    assert pages.main([str(results), str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"verdict.html", "built.html", "gates.html", *PLOTS}
    built = (out / "built.html").read_text()
    assert "no &lt;xcrun&gt; on this host" in built and "int8-kmeans-g32" in built and "2.13.0" in built
    judged = (out / "gates.html").read_text()
    assert (
        LOGITS.replace("'", "&#x27;") in judged and '<details open><summary><span class="not_run">' in judged
    )
    assert not Loads(built + judged).found
    errors = (out / "errors.svg").read_text()
    assert "Logit error by position" in errors and "no bundle has" not in errors
    assert "came from the store" in (out / "jobs.svg").read_text()


def test_a_release_with_nothing_to_plot_says_so_in_every_figure(results, tmp_path):
    edit(results, lambda release: release.update(gates={}, recipes={}))
    out = tmp_path / "out"
    pages.main([str(results), str(out)])
    for name in PLOTS:
        text = " ".join(re.findall(r"<text[^>]*>([^<]*)", (out / name).read_text()))
        assert re.search(r"\bno\b", text), name


@pytest.mark.parametrize(
    ("name", "expected", "bound", "found", "kind"),
    [
        ("a: error", "<= 0.5", 0.5, 0.25, Kind.MARGIN),
        ("a: error", "<= 0", 0.0, 0.0, Kind.EXACT),
        ("a: error of a scale, in ulp", "<= 0.5", 0.5, 0.4999, Kind.ROUNDING),
        ("a: error, in steps of its row", "<= 0.5", 0.5, 0.4999, Kind.ROUNDING),
        ("a: positions", ">= 8", 8.0, 8.0, Kind.COUNT),
        ("a: least SNR, dB", ">= 10", 10.0, 11.5, Kind.MARGIN),
    ],
)
def test_a_figure_that_is_met_by_its_nature_is_no_near_miss(results, name, expected, bound, found, kind):
    """It is nearest to nothing; but where it failed, it is told like any other."""

    def row_of(passed):
        checks = [check(name, passed, expected)]
        edit(
            results,
            lambda release: release.update(
                gates={"x_y": gate("x", "y", bounds={name: bound}, checks=checks)}
            ),
        )
        write_json(results / "gates/x/y/measured.json", {name: found})
        return gate_rows(Facts.read(results))[1][-2:]

    near = (
        f"{found / bound if expected[0] == '<' else bound / found:.3f}" if bound else "0.000",
        f"y: {name}",
    )
    assert row_of(passed=True) == (near if kind is Kind.MARGIN else ("-", f"1 {kind}"))
    assert row_of(passed=False) == near


def test_the_first_page_says_whether_there_is_a_release_and_why_a_gate_was_not_run(results):
    said = text_of(pages.verdict(Facts.read(results)))
    assert said.startswith("Passed Gates passed 2 of 3 Not run gpu (1): this host has no Metal")
    assert f"Not compiled 1 bundles ahead of time: {NO_XCRUN}" in said and "5.0 MB in 2 folders" in said
    assert "Failed" not in said and "Not reached" not in said


def stopped(results, pending=("numbers",), since=0.0, required=("numbers_t_core.aimodel",)):
    """Facts of a run without a release over the three gates, which have left their verdicts."""
    release = json.loads((results / "release/release.json").read_text())
    gates = {
        name: results / "gates" / entry["gate"] / f"{name.removeprefix(entry['gate'] + '_')}.manifest.json"
        for name, entry in release["gates"].items()
    }
    for name, entry in release["gates"].items():
        verdict = {key: value for key, value in entry.items() if key != "required"}
        if entry["gate"] == "numbers":
            failed = check(LOGITS, False, "<= 0.5", "0.75 at <3>")
            verdict |= {
                "verdict": "fail",
                "reason": f"{LOGITS}: expected <= 0.5, found 0.75",
                "checks": [failed],
            }
        write_json(manifest.tree_path(gates[name]) / "verdict.json", verdict)
    write_json(results / "gates/numbers/t_core.aimodel/measured.json", {LOGITS: 0.75})
    waits = {str(path) for path in gates.values() if path.parent.name in pending}
    names = {"model": "t", "slug": "t", "recipes": ["int8-kmeans-g32"]}
    return Facts.of_stopped_run(results, names, gates, required, waits, since)


def test_a_run_that_a_gate_stopped_shows_that_gate_first_with_bound_and_value(results, tmp_path):
    facts = stopped(results)
    pages.write(facts, tmp_path / "out")
    first = text_of((tmp_path / "out/verdict.html").read_text())
    assert first.startswith("Failed: no release was made numbers on t_core.aimodel")
    assert f"{LOGITS}: expected <= 0.5, found 0.75" in first and "Gates passed 1 of 3 Failed 1" in first
    judged = text_of((tmp_path / "out/gates.html").read_text())
    assert judged.startswith("t What stopped the release fail numbers on t_core.aimodel") and "1.5" in judged
    assert "No release was made" in (tmp_path / "out/built.html").read_text()
    assert "5.0 MB" not in first  # of the release of an earlier run, which still lies there


def test_a_verdict_of_an_earlier_run_is_not_taken_for_one_of_this(results):
    """Such as the failure of a gate that this run did not get to, since a bundle before it was not built."""
    stopped(results)
    old = results / "gates/numbers/t_core.aimodel/verdict.json"
    now = old.stat().st_mtime
    assert [gate.gate for gate in stopped(results, since=now - 60).stopping()] == ["numbers"]
    late = stopped(results, since=now + 3600)
    assert late.unreached == ["numbers_t_core.aimodel"] and not late.stopping()
    assert "Not reached 1" in text_of(pages.verdict(late))


def test_a_required_gate_that_was_not_run_stops_a_release(results):
    facts = stopped(results, pending=(), required=("numbers_t_core.aimodel", "gpu_macos"))
    assert [gate.gate for gate in facts.stopping()] == ["gpu", "numbers"]
    assert "gpu on macos required, and not run: this host has no Metal" in text_of(pages.verdict(facts))


def test_every_series_of_a_figure_by_position_is_in_its_legend(results, tmp_path):
    """One entry for a dialogue, however it was fed, one for what it is compared with, one for the bounds."""
    names = ["digits", "digits, one by one", "france", "france, one by one"]
    series = {f"{name}: logits against {other}": [0.1, 0.2] for name in names for other in ("a", "b")}
    write_json(results / "gates/numbers/t_core.aimodel" / BY_POSITION, series)
    errors = tmp_path / "errors.svg"
    PLOTS["errors.svg"](Facts.read(results), errors)
    said = re.findall(r"<text[^>]*>([^<]*)</text>", errors.read_text())
    for entry in ("digits", "france", "logits against a", "logits against b", "bound"):
        assert said.count(entry) == 1, entry


def test_layers_without_loss_are_marked_apart_from_those_with_noise(results, tmp_path):
    """So that 170 dB of rounding do not press all others into one line."""
    tensors = {f"layers.{layer}.mlp.up_proj.weight": {"snr_db": 44.0 + layer} for layer in range(3)}
    tensors |= {f"layers.{layer}.mlp.up_proj.weight": {"snr_db": 170.0} for layer in (3, 4)}
    write_json(results / "weights/int8-kmeans-g32/report.json", {"tensors": tensors})
    signal = tmp_path / "signal.svg"
    PLOTS["signal.svg"](Facts.read(results), signal)
    said = re.findall(r"<text[^>]*>([^<]*)</text>", signal.read_text())
    assert {"mlp", "mlp: exact", "floor: mlp"} <= set(said)
    assert max(float(text) for text in said if re.fullmatch(r"[\d.]+", text)) < 60


def test_no_release_is_one_clear_error(tmp_path):
    with pytest.raises(UserError, match="build the release first"):
        Facts.read(tmp_path)


def test_figures_by_position_stay_out_of_the_verdict(tmp_path):
    verdict = Verdict("numbers", "core")
    verdict.by_position("a: logits", [0.5, float("nan"), 0.1234567890])
    verdict.at_most("a: logits", 0.5, 1.0)
    verdict.conclude(tmp_path)
    assert json.loads((tmp_path / BY_POSITION).read_text()) == {"a: logits": [0.5, None, 0.123457]}
    assert "0.1234" not in (tmp_path / "verdict.json").read_text()


@pytest.mark.parametrize("text", ["", "short", "x" * 40, "y" * 41, "z" * 400])
def test_long_names_lose_their_middle(text):
    found = shorten(text, 40)
    assert len(found) <= 40 and (found == text) == (len(text) <= 40)


@pytest.mark.end_to_end
def test_a_failed_gate_gets_a_report_and_the_next_run_its_own(tmp_path):
    """The tables' release, with a bound that nothing meets; then with the right one, and nothing else said."""
    project = tmp_path / "project"
    copy_project(project)
    declared = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    small = {
        "folders": {name: None for name in declared["folders"] if name != "ios-frontend"},
        "gates": {"required": ["tables"], "reported": [], "evidence": []},
        "artifacts": {"head_fp16": None},
    }
    (project / "small.yaml").write_text(yaml.safe_dump(small))
    command = [sys.executable, "-m", "snakemake", "-j2", "report", "--configfile", "small.yaml"]
    command += ["--config", 'store={"folder": "off"}']  # a value with braces goes through shells, too
    page = project / "results/gemma-4-tiny/report.html"
    bounds = project / "workflow_scripts/gates/tables.py"
    right = bounds.read_text()
    bounds.write_text(right.replace('in ulp", value, 0.5', 'in ulp", value, 1e-9'))
    failed = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert (
        failed.returncode == 1
        and "what stopped the release: results/gemma-4-tiny/report.html" in failed.stderr
    )
    said = page.read_text(encoding="utf-8")
    assert "Failed: no release was made" in said and "embed_tokens.weight: error of a scale, in ulp" in said
    bounds.write_text(right)
    subprocess.run(command, cwd=project, capture_output=True, check=True)
    said = page.read_text(encoding="utf-8")
    assert "Passed</h2>" in said and "Failed: no release" not in said
    assert "max-width: 700px" in said  # the style of a phone is in it
