"""The report's figures: narrow and tall, with one column of panels, so that they can be read on a phone.

Colours are Okabe and Ito's (2008), which the colour-blind can tell apart; black is left to bounds. A figure without
anything to show says so.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from workflow_scripts.gates.verdict import FOUND_BYTES, PREDICTED_BYTES
from workflow_scripts.quantize.recipes import RECIPES
from workflow_scripts.report.facts import Check, Facts, Gate
from workflow_scripts.report.summary import shorten, stage_rows

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BOUND = {"color": "black", "linestyle": "--", "linewidth": 1.0}
_MARKERS = ".x^s"
_EXACT_DB = 120  # above it only the rounding of float32 is left (some 150 dB), below it what a recipe lost
_WIDTH = 4.4  # inches: at a phone's 390 pixels the text has some 11 of them
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
}


@contextmanager
def _panels(path: Path, title: str, heights: Sequence[float]) -> Iterator[list[Axes]]:
    """One panel of each height in inches, one below the other; written to `path` at the end."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            len(heights),
            1,
            figsize=(_WIDTH, sum(heights) + 0.5),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        figure.suptitle(title, fontsize=10.5, fontweight="bold")
        yield list(axes[:, 0])
        figure.savefig(path)
        plt.close(figure)


def _nothing(path: Path, title: str, why: str) -> None:
    with _panels(path, title, [0.8]) as (axes,):
        axes.set_axis_off()
        axes.text(0.5, 0.5, why, ha="center", va="center", wrap=True)


def _legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """A panel that holds the legend of those below it, where it covers nothing."""
    axes.set_axis_off()
    axes.legend(handles=handles, loc="center", ncols=2, borderpad=0)


def _bars(axes: Axes, labels: Sequence[str], values: Sequence[float], text: Callable[[float], str]) -> None:
    """Horizontal bars from top to bottom, each with its figure."""
    places = np.arange(len(labels))
    bars = axes.barh(places, values, color=COLOURS[0], height=0.7)
    axes.bar_label(bars, [text(value) for value in values], padding=3, fontsize=8)
    axes.set_yticks(places, [shorten(label, 30) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.margins(x=0.22)


def sizes(facts: Facts, path: Path) -> None:
    """Stored bytes of each bundle, and a mark where the recipe predicted them."""
    title = "Bytes of constants against prediction"
    found = [
        (gate.target, gate.measured[FOUND_BYTES] / 1e6, gate.measured[PREDICTED_BYTES] / 1e6)
        for gate in facts.gates
        if gate.gate == "structure" and FOUND_BYTES in gate.measured
    ]
    if not found:
        _nothing(path, title, "no bundle in this release")
        return
    with _panels(path, title, [0.2, 0.27 * len(found) + 0.6]) as (legend, axes):
        names = [
            name.removeprefix(f"{facts.release['slug']}_").removesuffix(".aimodel") for name, *_ in found
        ]
        _bars(axes, names, [size for _, size, _ in found], lambda value: f"{value:,.2f}")
        places = np.arange(len(found))
        axes.plot([p for *_, p in found], places, "|", color=COLOURS[1], markersize=14, label="predicted")
        axes.set_xlabel("MB (1e6 bytes)")
        _legend(legend, axes.get_legend_handles_labels()[0])


def margins(facts: Facts, path: Path) -> None:
    """Of every figure with a margin to its bound the share of the bound that it used."""
    title = "How much of each bound was used"
    kinds: dict[str, list[Check]] = {}
    for gate in facts.gates:
        if bounded := [check for check in gate.checks if check.margin is not None]:
            kinds.setdefault(gate.gate, []).extend(bounded)
    if not kinds:
        _nothing(path, title, "no gate of this release has a figure with a margin")
        return
    with _panels(path, title, [0.33 * len(kinds) + 0.7]) as (axes,):
        for place, bounded in enumerate(kinds.values()):
            shares = np.clip([check.margin for check in bounded], 1e-4, 10)
            spread = place + np.linspace(-0.25, 0.25, len(shares) + 2)[1:-1]
            failed = np.array([not check.passed for check in bounded])
            axes.plot(shares[~failed], spread[~failed], "o", color=COLOURS[0], markersize=3.5, alpha=0.6)
            axes.plot(shares[failed], spread[failed], "X", color=COLOURS[1], markersize=7)
        axes.axvline(1.0, **_BOUND)
        axes.annotate("bound", (1.0, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
        axes.set_yticks(range(len(kinds)), [f"{kind} ({len(bounded)})" for kind, bounded in kinds.items()])
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xlim(0.8e-4, 13)
        axes.set_xlabel("found / bound (a cross failed)")


def errors(facts: Facts, path: Path) -> None:
    """The largest logit error of every position, bundle by bundle, with its bound."""
    title = "Logit error by position"
    bundles = _having(facts, "numbers", "logits")
    _series(facts, path, title, bundles, "largest |error|", "no bundle has logits by position")


def divergences(facts: Facts, path: Path) -> None:
    """KL divergence from the original at every position of the long run, folder by folder."""
    title = "KL divergence over the long run"
    _series(facts, path, title, _having(facts, "long_run", "KL"), "nats", "no long run in this release", True)


def _having(facts: Facts, kind: str, word: str) -> list[tuple[Gate, dict[str, list[float]]]]:
    """The gates of a kind that have series with a word in their name, and these."""
    found = [(gate, {n: s for n, s in gate.series.items() if word in n}) for gate in facts.gates]
    return [(gate, series) for gate, series in found if gate.gate == kind and series]


def _series(
    facts: Facts,
    path: Path,
    title: str,
    gates: Sequence[tuple[Gate, dict[str, list[float]]]],
    unit: str,
    nothing: str,
    of_mean: bool = False,
) -> None:
    """A panel for each gate with its series and the smallest and largest of its bounds."""
    if not gates:
        _nothing(path, title, nothing)
        return
    looks = _looks(gates)
    handles = [*_keys(looks), Line2D([], [], label="bound of the mean" if of_mean else "bound", **_BOUND)]
    with _panels(path, title, [0.17 * ((len(handles) + 1) // 2), *[1.25] * len(gates)]) as (legend, *panels):
        _legend(legend, handles)
        for axes, (gate, series) in zip(panels, gates, strict=True):
            name = gate.target.rpartition("/")[2].removeprefix(f"{facts.release['slug']}_")
            axes.set_title(name.removesuffix(".aimodel") + _mean(gate), loc="left")
            for series_name, values in series.items():
                points = np.maximum(np.array([np.nan if v is None else v for v in values]), 1e-9)
                axes.plot(points, linewidth=0.8, markersize=4, **looks[series_name])
            bounds = [b for n, b in gate.bounds.items() if n in series or (of_mean and "KL" in n)]
            for bound in sorted({min(bounds), max(bounds)}) if bounds else []:
                axes.axhline(bound, **_BOUND)
            axes.set_yscale("log")
            axes.set_ylabel(unit)
        panels[-1].set_xlabel("position")


def _looks(gates: Sequence[tuple[Gate, dict[str, list[float]]]]) -> dict[str, dict[str, str]]:
    """Name of a series -> its look in every panel: a colour for a dialogue, a marker for what it is compared with.

    A core with states is fed a dialogue in several ways, `<dialogue>, <way>: <comparison>`, which look the same.
    """
    names = sorted({name for _, series in gates for name in series})
    parts = {name: _dialogue_and_comparison(name) for name in names}
    dialogues, comparisons = (list(dict.fromkeys(part[end] for part in parts.values())) for end in (0, 1))
    return {
        name: {
            "color": COLOURS[dialogues.index(dialogue) % len(COLOURS)],
            "marker": _MARKERS[comparisons.index(comparison) % len(_MARKERS)],
        }
        for name, (dialogue, comparison) in parts.items()
    }


def _dialogue_and_comparison(series: str) -> tuple[str, str]:
    name, _, comparison = series.partition(": ")
    return name.partition(", ")[0], comparison


def _keys(looks: dict[str, dict[str, str]]) -> list[Line2D]:
    """What a legend says of these looks: each dialogue with its colour, each comparison with its marker."""
    colours, markers = {}, {}
    for series, look in looks.items():
        dialogue, comparison = _dialogue_and_comparison(series)
        colours[dialogue] = Line2D([], [], color=look["color"], label=shorten(dialogue, 34))
        markers[comparison] = Line2D(
            [], [], color="grey", marker=look["marker"], linestyle="", label=shorten(comparison, 34)
        )
    return [*colours.values(), *(markers.values() if len(markers) > 1 else [])]


def _mean(gate: Gate) -> str:
    """Of a long run the mean divergence with its interval, where it has one."""
    names = (
        "KL divergence, mean",
        "KL divergence, lower end",
        "KL divergence, upper end of its mean's 95% interval",
    )
    found = [value for end in names for name, value in gate.measured.items() if name.endswith(f": {end}")]
    return ": {:.2g} ({:.2g} to {:.2g})".format(*found) if len(found) == len(names) else ""


def signal(facts: Facts, path: Path) -> None:
    """Least signal-to-noise ratio of a matrix in each layer, recipe by recipe; dashed where a recipe refuses it."""
    title = "Signal to noise of the weights by layer"
    curves = {recipe: found for recipe, report in facts.quality.items() if (found := _by_layer(report))}
    if not curves:
        _nothing(path, title, "no recipe with noise in this release")
        return
    with _panels(path, title, [1.6] * len(curves)) as panels:
        for axes, (recipe, layers) in zip(panels, curves.items(), strict=True):
            axes.set_title(recipe, loc="left")
            _draw_floors(axes, recipe, layers.keys())
            for colour, (kind, points) in zip(COLOURS, sorted(layers.items()), strict=False):
                lossy = {layer: snr for layer, snr in points.items() if snr < _EXACT_DB}
                if lossy:
                    heights = [lossy.get(layer, np.nan) for layer in sorted(points)]
                    axes.plot(sorted(points), heights, "o-", color=colour, markersize=3, label=kind)
                _mark_exact(axes, points.keys() - lossy.keys(), colour, f"{kind}: exact")
            axes.margins(y=0.25)
            axes.set_ylabel("dB")
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        panels[-1].set_xlabel("layer")


def _draw_floors(axes: Axes, recipe: str, kinds: Collection[str]) -> None:
    """The least SNR that a recipe lets pass, for each kind of matrix."""
    encodings = RECIPES[recipe].encodings if recipe in RECIPES else {}
    floors: dict[float, list[str]] = {}
    for kind in sorted(kinds & encodings.keys()):
        floors.setdefault(encodings[kind].snr_floor_db, []).append(kind)
    for floor, held in floors.items():
        axes.axhline(floor, **_BOUND)
        axes.annotate(
            f"floor: {', '.join(held)}",
            (0.99, floor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            fontsize=7,
        )


def _mark_exact(axes: Axes, layers: Collection[int], colour: str, label: str) -> None:
    """Layers that lost nothing stand at the upper edge, off the scale of those that did."""
    if layers:
        places = axes.get_xaxis_transform()  # x: layers; y: share of the height
        axes.plot(
            sorted(layers),
            [0.96] * len(layers),
            "^",
            color=colour,
            markersize=5,
            label=label,
            transform=places,
        )


def _by_layer(report: dict) -> dict[str, dict[int, float]]:
    """Kind of matrix -> layer -> least SNR; tensors that are stored exactly have none."""
    layers: dict[str, dict[int, float]] = {}
    for name, entry in report["tensors"].items():
        if name.startswith("layers.") and entry["snr_db"] is not None:
            layer, kind = int(name.split(".")[1]), "mlp" if ".mlp." in name else "other"
            known = layers.setdefault(kind, {})
            known[layer] = min(known.get(layer, float("inf")), entry["snr_db"])
    return layers


def jobs(facts: Facts, path: Path) -> None:
    """Seconds and memory by stage."""
    title = "What the stages took on this host"
    rows = list(stage_rows(facts))
    if not rows:
        _nothing(path, title, "no job ran: every result came from the store")
        return
    height = 0.24 * len(rows) + 0.6
    with _panels(path, title, [height, height]) as (time, memory):
        longest = sorted(((seconds, f"{stage} ({count})") for stage, count, seconds, _ in rows), reverse=True)
        time.set_title("Seconds, all jobs of a stage (number)", loc="right")
        _bars(time, [name for _, name in longest], [s for s, _ in longest], lambda value: f"{value:,.1f}")
        time.set_xlabel("seconds")
        largest = sorted(((peak / 2**20, stage) for stage, _, _, peak in rows), reverse=True)
        memory.set_title("Anonymous memory, largest job of a stage", loc="right")
        _bars(memory, [name for _, name in largest], [p for p, _ in largest], lambda value: f"{value:,.0f}")
        memory.set_xlabel("MiB")


PLOTS = {
    "sizes.svg": sizes,
    "margins.svg": margins,
    "errors.svg": errors,
    "divergences.svg": divergences,
    "signal.svg": signal,
    "jobs.svg": jobs,
}
"""File of the report -> what draws it."""
