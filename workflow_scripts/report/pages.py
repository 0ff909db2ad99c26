"""`pages RESULTS OUT`: the report's tables as small HTML pages, and its figures; what `snakemake report` embeds."""

import argparse
import html
from collections.abc import Sequence
from pathlib import Path

from workflow_scripts.files import write_atomic
from workflow_scripts.report import summary
from workflow_scripts.report.facts import Facts, Gate
from workflow_scripts.report.plots import PLOTS
from workflow_scripts.store.command import show_size

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem; max-width: 72rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 14px; }
td, th { padding: 0.25rem 0.7rem 0.25rem 0; text-align: left; vertical-align: top; max-width: 28rem; }
th { border-bottom: 1px solid #888; } tr + tr td { border-top: 1px solid #e4e4e4; }
.pass { color: #00624a; } .fail { color: #a82800; font-weight: bold; } .not_run { color: #7a5200; }
summary { cursor: pointer; padding: 0.2rem 0; } div { overflow-x: auto; }
"""
Rows = Sequence[Sequence[str]]


def main(arguments: list[str]) -> int:
    """Write every page and figure. Raises UserError where there is no release."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts pages", description=__doc__)
    parser.add_argument("results", type=Path, help="such as results/gemma-4-tiny")
    parser.add_argument("out", type=Path, help="folder of the pages")
    options = parser.parse_args(arguments)
    facts = Facts.read(options.results)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, body in {"built.html": built(facts), "gates.html": gates(facts)}.items():
        write_atomic(options.out / name, _page(facts.release["model"], body))
        print(f"wrote {options.out / name}")
    for name, draw in PLOTS.items():
        draw(facts, options.out / name)
        print(f"wrote {options.out / name}")
    return 0


def built(facts: Facts) -> str:
    """What was built of what, what was not done, and the tools."""
    release = facts.release
    artifacts = [
        (name, entry["form"], entry["recipe"] or "-", entry["compute"] or "-", show_size(entry["bytes"]))
        for name, entry in release["artifacts"].items()
    ]
    recipes = [
        (name, f"{entry['total']['bits_per_weight']:.3f}", show_size(entry["total"]["bytes"]))
        for name, entry in release["recipes"].items()
    ]
    tools = [(name, ", ".join(versions)) for name, versions in release["tools"].items()]
    not_done = "".join(f"<li>{html.escape(line)}</li>" for line in facts.not_done())
    return "".join(
        [
            f"<p>Checkpoint <code>{html.escape(release['checkpoint']['digest'])}</code>. {summary.took(facts)}.</p>",
            "<h2>Not done on this host, and why</h2>",
            f"<ul>{not_done}</ul>" if not_done else "<p>Nothing: everything was built and judged.</p>",
            "<h2>Folders</h2>",
            _table(summary.folder_rows(facts)),
            "<h2>Artifacts</h2>",
            _table([("artifact", "form", "recipe", "compute", "size"), *artifacts]),
            "<h2>Recipes</h2>",
            _table([("recipe", "bits per weight", "size"), *recipes]),
            "<h2>Tools</h2>",
            _table([("tool", "version"), *tools]),
        ]
    )


def gates(facts: Facts) -> str:
    """One line for each kind of gate, then every gate with all its checks."""
    kinds = _table(summary.gate_rows(facts))
    return f"{kinds}<h2>Every check</h2>" + "".join(map(_gate, facts.gates))


def _gate(gate: Gate) -> str:
    title = f"{gate.gate} on {gate.target}"
    rows = [
        (
            check.name,
            "ok" if check.passed else "FAIL",
            summary.shorten(check.expected, 60),
            summary.shorten(check.found, 60),
            "" if check.used is None else f"{check.used:.3g}",
        )
        for check in gate.checks
    ]
    reason = f"<p>{html.escape(gate.reason)}</p>" if gate.reason else ""
    table = _table([("check", "", "expected", "found", "of bound"), *rows]) if rows else ""
    shown = " open" if gate.verdict != "pass" else ""
    verdict = f'<span class="{gate.verdict}">{gate.verdict}</span>'
    return f"<details{shown}><summary>{verdict} {html.escape(title)}</summary>{reason}{table}</details>"


def _table(rows: Rows) -> str:
    head, *body = ([html.escape(cell) for cell in row] for row in rows)
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in body]
    return f"<div><table>{''.join(lines)}</table></div>"


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    return (
        f"<!doctype html><html><head>{head}</head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n"
    )
