"""`pages RESULTS OUT`: the report's tables as small HTML pages, and its figures; what `snakemake report` embeds."""

import argparse
import html
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from workflow_scripts.files import write_atomic
from workflow_scripts.report import summary
from workflow_scripts.report.facts import Check, Facts, Gate
from workflow_scripts.report.plots import PLOTS
from workflow_scripts.store.command import show_size

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 1rem; max-width: 72rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 14px; }
td, th { padding: 0.25rem 0.7rem 0.25rem 0; text-align: left; vertical-align: top; max-width: 28rem; }
th { border-bottom: 1px solid #888; } tr + tr td { border-top: 1px solid #e4e4e4; }
.pass { color: #00624a; } .fail { color: #a82800; font-weight: bold; } .not_run { color: #7a5200; }
code { overflow-wrap: anywhere; } summary { cursor: pointer; padding: 0.2rem 0; } div { overflow-x: auto; }
"""
VERDICT = "verdict.html"
"""What the report's first page shows: a part of it, no page."""
_FIRST = 12  # failed checks on the first page
Rows = Sequence[Sequence[str]]


def main(arguments: list[str]) -> int:
    """Write every page and figure. Raises UserError where there is no release."""
    parser = argparse.ArgumentParser(prog="python -m workflow_scripts pages", description=__doc__)
    parser.add_argument("results", type=Path, help="such as results/gemma-4-tiny")
    parser.add_argument("out", type=Path, help="folder of the pages")
    options = parser.parse_args(arguments)
    for path in write(Facts.read(options.results), options.out):
        print(f"wrote {path}")
    return 0


def write(facts: Facts, out: Path) -> list[Path]:
    """Write every page and figure into a folder; gives their paths."""
    out.mkdir(parents=True, exist_ok=True)
    model = facts.release["model"]
    pages = {
        VERDICT: verdict(facts),
        "built.html": _page(model, built(facts)),
        "gates.html": _page(model, gates(facts)),
    }
    for name, text in pages.items():
        write_atomic(out / name, text)
    for name, draw in PLOTS.items():
        draw(facts, out / name)
    return [out / name for name in (*pages, *PLOTS)]


def verdict(facts: Facts) -> str:
    """The first thing to read: whether there is a release, and how many gates say so. HTML without a frame."""
    counts = Counter(gate.verdict for gate in facts.gates)
    rows = [
        ("Gates passed", f"{counts['pass']} of {len(facts.gates) + len(facts.unreached)}"),
        ("Failed", str(counts["fail"])),
        ("Not run", _reasons(facts)),
        ("Not reached", str(len(facts.unreached))),
        ("Not compiled", _not_compiled(facts)),
        ("Size", _size(facts)),
        ("Jobs", summary.took(facts)),
    ]
    title = "Failed: no release was made" if facts.stopped else "Passed"
    head = f'<h2 class="{"fail" if facts.stopped else "pass"}">{title}</h2>'
    lines = "".join(
        f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>"
        for name, text in rows
        if text not in ("0", "")
    )
    return f'<div class="verdict">{head}{_why(facts)}<table>{lines}</table></div>\n'


def _why(facts: Facts) -> str:
    """What stopped a release: the first of the checks that failed, or what a required gate could not run."""
    said = [
        (gate, f"{check.name}: expected {check.expected}, found {check.found}")
        for gate in facts.stopping()
        for check in gate.checks
        if not check.passed
    ]
    said += [
        (gate, f"required, and not run: {gate.reason}")
        for gate in facts.stopping()
        if gate.verdict == "not_run"
    ]
    lines = [
        f"<li><b>{html.escape(f'{gate.gate} on {gate.target}')}</b><br>{html.escape(text)}</li>"
        for gate, text in said[:_FIRST]
    ]
    if len(said) > _FIRST:
        lines.append(f"<li>and {len(said) - _FIRST} more, see the gates</li>")
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _reasons(facts: Facts) -> str:
    """How many gates of a kind this host could not run, and why."""
    why = Counter((gate.gate, gate.reason or "") for gate in facts.gates if gate.verdict == "not_run")
    return "; ".join(f"{kind} ({count}): {reason}" for (kind, reason), count in why.items())


def _not_compiled(facts: Facts) -> str:
    why = Counter(entry["not_built"] for entry in facts.release["aot"].values() if entry["not_built"])
    return "; ".join(f"{count} bundles ahead of time: {reason}" for reason, count in why.items())


def _size(facts: Facts) -> str:
    folders = facts.release["folders"].values()
    return (
        f"{show_size(sum(entry['bytes'] for entry in folders))} in {len(folders)} folders" if folders else ""
    )


def built(facts: Facts) -> str:
    """What was built of what, what was not done, and the tools."""
    not_done = "".join(f"<li>{html.escape(line)}</li>" for line in facts.not_done())
    done = [
        "<h2>Not done on this host, and why</h2>",
        f"<ul>{not_done}</ul>" if not_done else "<p>Nothing: everything was built and judged.</p>",
    ]
    if facts.stopped:
        unreached = "".join(f"<li>{html.escape(name)}</li>" for name in facts.unreached)
        return "".join(
            [
                f"<p>No release was made: see the gates. {summary.took(facts)}.</p>",
                *(done if not_done else []),
                f"<h2>Gates that were not reached</h2><ul>{unreached}</ul>" if unreached else "",
            ]
        )
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
    return "".join(
        [
            f"<p>Checkpoint <code>{html.escape(release['checkpoint']['digest'])}</code>. {summary.took(facts)}.</p>",
            *done,
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
    """What stopped the release, one line for each kind of gate, then every gate with all its checks."""
    stopping = facts.stopping()
    others = [gate for gate in facts.gates if not gate.stops]
    first = f"<h2>What stopped the release</h2>{_all(stopping)}<h2>All gates</h2>" if stopping else ""
    return f"{first}{_table(summary.gate_rows(facts))}<h2>Every check</h2>{_all(others)}"


def _all(gates: Iterable[Gate]) -> str:
    return "".join(map(_gate, gates))


_CHECK_HEAD = ("check", "", "expected", "found", "of bound")


def _gate(gate: Gate) -> str:
    title = f"{gate.gate} on {gate.target}"
    rows = [_check_row(check) for check in sorted(gate.checks, key=lambda check: check.passed)]
    reason = f"<p>{html.escape(gate.reason)}</p>" if gate.reason and gate.verdict == "not_run" else ""
    table = _table([_CHECK_HEAD, *rows]) if rows else ""
    shown = " open" if gate.verdict != "pass" else ""
    verdict = f'<span class="{gate.verdict}">{gate.verdict}</span>'
    return f"<details{shown}><summary>{verdict} {html.escape(title)}</summary>{reason}{table}</details>"


def _check_row(check: Check) -> tuple[str, ...]:
    """A check as cells of a table; one that failed with all its words."""
    words = [check.expected, check.found]
    return (
        check.name,
        "ok" if check.passed else "FAIL",
        *(summary.shorten(text, 60) if check.passed else text for text in words),
        f"{check.margin:.3g}" if check.margin is not None else str(check.kind or ""),
    )


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
