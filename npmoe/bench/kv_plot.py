"""Records of `measure_cells` as a PNG: time of a step against context, drawn by matplotlib."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npmoe.bench.kv_report import row_names
from npmoe.bench.measure import format_words
from npmoe.errors import NpmoeError

PANEL_WIDTH, LEGEND_WIDTH, HEIGHT, DPI = 3.8, 1.4, 4.0, 150
"""Inches; dots an inch."""
MARKERS = "osD^vP*X<>"
Line = list[tuple[int, float]]
"""(context in tokens, milliseconds of a step) of each cell that was measured."""


class NoPlot(NpmoeError):
    """A plot cannot be drawn; says why."""


def lines_of(records: list[dict[str, Any]]) -> dict[int, dict[str, Line]]:
    """Batch -> name of a row -> its line, of cells with a time."""
    found: dict[int, dict[str, Line]] = {}
    for r, name in zip(records, row_names(records), strict=True):
        if "ms_per_token" in r:
            line = found.setdefault(r["batch"], {}).setdefault(name, [])
            line.append((r["context"], r["ms_per_token"]))
    return found


def write_plot(records: list[dict[str, Any]], path: Path) -> None:
    """A panel for each batch with a time in it, a line for each format; both axes logarithmic.

    Raises NoPlot where matplotlib is missing or no cell has a time.
    """
    if find_spec("matplotlib") is None:
        raise NoPlot("matplotlib is not installed: pip install 'npmoe[bench]'")
    panels = lines_of(records)
    if not panels:
        raise NoPlot("no cell was measured")
    figure = import_module("matplotlib.figure").Figure(
        figsize=(LEGEND_WIDTH + PANEL_WIDTH * len(panels), HEIGHT), layout="constrained"
    )
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    drawn: dict[str, Any] = {}
    names = list(dict.fromkeys(row_names(records)))
    for at, (batch, lines) in zip(axes, panels.items(), strict=True):
        at.set(title=f"batch {batch}", xlabel="context, tokens", xscale="log", yscale="log")
        for name, line in lines.items():
            (drawn[name],) = at.plot(*zip(*line, strict=True), **_style(names.index(name)))
    axes[0].set_ylabel("time of a step, ms")
    _label_ticks(axes[0], sorted({r["context"] for r in records if "ms_per_token" in r}))
    figure.legend(drawn.values(), drawn, title="KV cache", frameon=False, loc="outside right upper")
    first = records[0]
    where = first.get("gpu", first["device"])
    figure.suptitle(f"{first['shape']} on {where}, weights {format_words(first['weights'])}")
    figure.savefig(path, dpi=DPI)


def context_label(tokens: float) -> str:
    """8192 as 8k; as it is where it is no multiple of 1024."""
    return f"{tokens / 1024:.0f}k" if tokens % 1024 == 0 else f"{tokens:,.0f}"


def _style(i: int) -> dict[str, Any]:
    """Of the i-th row."""
    return {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 5}


def _label_ticks(at: Any, contexts: list[int]) -> None:
    """At the contexts, and at 1, 2 and 5 times powers of ten; of all panels, which share axes."""
    ticker = import_module("matplotlib.ticker")
    at.xaxis.set_major_locator(ticker.FixedLocator(contexts))
    at.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: context_label(x)))
    at.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    at.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    for axis in (at.xaxis, at.yaxis):
        axis.set_minor_locator(ticker.NullLocator())
