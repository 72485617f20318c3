"""The charts of a page as SVG or PNG files for papers, drawn with matplotlib (the extra `figures`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cimage_dist.errors import UserError
from cimage_dist.reporting.charts import Chart

# The page's colours on white.
PALETTE = ("#0f766e", "#c2410c", "#4f46e5", "#ca8a04", "#be185d", "#0369a1", "#4d7c0f", "#7e22ce", "#b91c1c", "#525252")
_STYLE: Any = {
    "font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "legend.frameon": False, "svg.fonttype": "none",
    "figure.figsize": (3.4, 2.4), "savefig.dpi": 300, "savefig.bbox": "tight",
}  # fmt: skip


def write_figures(charts: Sequence[Chart], folder: Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """One file for every chart but tables and every kind, named after the chart; a map gives one for every view and colour."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("Figures are drawn with matplotlib, which is not installed. Install it: pip install 'cimage-dist[figures]'.") from None
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(_STYLE):
        for chart in charts:
            for name, paint in _drawings(chart):
                figure = Figure(layout="constrained")
                paint(figure.add_subplot())
                for kind in kinds:
                    written.append(folder / f"{name}.{kind}")
                    figure.savefig(written[-1])
    return written


def _drawings(chart: Chart) -> list[tuple[str, Callable[[Any], None]]]:
    """(file name, how to draw it) of a chart."""
    slug = re.sub(r"[^a-z0-9]+", "-", chart["title"].lower()).strip("-")
    if chart["kind"] == "scatter":
        return [
            (f"{slug}-{re.sub(r'[^a-z0-9]+', '-', f'{view} {by}'.lower())}", functools.partial(_scatter, chart=chart, view=view, by=by))
            for view in chart["views"]
            for by in chart["colours"]
        ]
    painters = {"lines": _lines, "heat": _heat, "histogram": _histogram, "bars": _bars, "dots": _dots}
    return [(slug, functools.partial(painters[chart["kind"]], chart=chart))] if chart["kind"] in painters else []


def _lines(axes: Any, chart: Chart) -> None:
    for i, series in enumerate(chart["series"]):
        x, y = zip(*[(a, b) for a, b in series["points"] if b is not None], strict=True)
        axes.plot(x, y, color=PALETTE[i % 10], linewidth=1.2, label=series["name"], marker="o" if len(x) < 40 else None, markersize=2)
    _finish(axes, chart, len(chart["series"]) > 1)


def _histogram(axes: Any, chart: Chart) -> None:
    axes.stairs(chart["counts"], chart["edges"], fill=True, color=PALETTE[9], alpha=0.55)
    _finish(axes, chart)


def _bars(axes: Any, chart: Chart) -> None:
    width = 0.8 / len(chart["series"])
    for i, series in enumerate(chart["series"]):
        at = [j + (i - (len(chart["series"]) - 1) / 2) * width for j in range(len(chart["categories"]))]
        heights = [float("nan") if v is None else v for v in series["values"]]
        axes.bar(at, heights, width * 0.95, color=PALETTE[i % 10], label=series["name"], yerr=series["errors"] or None, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(chart["categories"])), chart["categories"])
    _finish(axes, chart, len(chart["series"]) > 1)


def _dots(axes: Any, chart: Chart) -> None:
    names = [row["name"] for row in chart["rows"]]
    for i, row in enumerate(chart["rows"]):
        values = row["values"]
        if values:
            mean = sum(values) / len(values)
            std = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
            axes.plot([mean - std, mean + std], [i, i], color=PALETTE[0], alpha=0.25, linewidth=6, solid_capstyle="butt")
            axes.plot(values, [i] * len(values), "o", color=PALETTE[0], alpha=0.55, markersize=2.5, markeredgewidth=0)
            axes.plot(mean, i, "|", color=PALETTE[0], markersize=10, markeredgewidth=1.5)
        if row["published"] is not None:
            axes.plot(row["published"], i, "D", markerfacecolor="none", markeredgecolor=PALETTE[1], markersize=5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _finish(axes, chart)


def _heat(axes: Any, chart: Chart) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    values = [[float("nan") if v is None else v for v in row] for row in chart["values"]]
    image = axes.imshow(
        values, cmap=LinearSegmentedColormap.from_list("page", ["#eef2f1", PALETTE[0]]), vmin=0, aspect="equal" if chart["split"] or chart["text"] else "auto"
    )
    for set_ticks, names in ((axes.set_xticks, chart["columns"]), (axes.set_yticks, chart["rows"])):
        step = max(1, len(names) // 8)
        set_ticks(range(0, len(names), step), names[::step])
    if chart["text"]:
        top = max((v for row in values for v in row if v == v), default=0.0)
        for i, row in enumerate(values):
            for j, v in enumerate(row):
                axes.text(j, i, f"{v:g}", ha="center", va="center", fontsize=6, color="white" if v > 0.55 * top else "black")
    if chart["split"]:
        axes.axhline(chart["split"] - 0.5, color="black", linewidth=0.6, linestyle="--")
        axes.axvline(chart["split"] - 0.5, color="black", linewidth=0.6, linestyle="--")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    _finish(axes, chart)


def _scatter(axes: Any, chart: Chart, view: str, by: str) -> None:
    x, y = zip(*chart["views"][view], strict=True)
    colours = chart["colours"][by]
    if colours["type"] == "class":
        axes.scatter(x, y, s=3, linewidths=0, c=["#dddddd" if v < 0 else PALETTE[v % 10] for v in colours["values"]])
    else:
        axes.figure.colorbar(axes.scatter(x, y, s=3, linewidths=0, c=colours["values"], cmap="viridis"), ax=axes, shrink=0.8, label=colours["label"])
    axes.set_axis_off()
    axes.set_title(f"{view}, by {by}")


def _finish(axes: Any, chart: Chart, has_legend: bool = False) -> None:
    for mark in chart.get("marks", []):
        axes.axvline(mark["x"], color="black", linewidth=0.8, linestyle="--")
        axes.text(mark["x"], 1.0, f" {mark['label']}", transform=axes.get_xaxis_transform(), va="top", fontsize=7)
    axes.set_title(chart["title"])
    axes.set_xlabel(chart.get("x", ""))
    axes.set_ylabel(chart.get("y", ""))
    if has_legend:
        axes.legend(fontsize=7)
