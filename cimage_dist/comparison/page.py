"""compare.html: every seed as a dot, the table, and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cimage_dist.comparison.summary import SCORES
from cimage_dist.comparison.table import cells, sentences
from cimage_dist.reporting.charts import Chart, dots, table
from cimage_dist.reporting.page import section, write_page

Row = tuple[str, list[float], float | None]
_UNITS = {"cluster.modularity": "modularity"}


def write_compare_page(path: Path, summary: Mapping[str, Any]) -> None:
    graph = summary["graph"]
    about = (
        f"{graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['features']:,} features; "
        f"{'edges held out for link prediction' if summary['task'] == 'link' else 'all edges seen'}"
    )
    heads, rows = cells(summary)
    charts = [_dots(summary, score) for score in summary["scores"]]
    sections = [
        section("All methods", "", [table("", "", heads, rows)]),
        section("Every seed a dot", "Methods by average rank, then references.", charts),
        section("What it costs", "Training alone.", [_seconds(summary), _memory(summary)]),
    ]
    title = f"Comparison on {graph['name']}"
    write_page(path, title, about, sentences(summary), _facts(summary), sections)


def _dots(summary: Mapping[str, Any], path: str) -> Chart:
    rows = _values((row["label"], row["scores"][path]) for row in summary["rows"])
    return dots(SCORES[path][0], "", _UNITS.get(path, "percent"), rows)


def _values(rows: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[Row]:
    return [(label, found["values"], None) for label, found in rows if found]


def _seconds(summary: Mapping[str, Any]) -> Chart:
    rows = _values((row["label"], row["seconds"]) for row in summary["rows"])
    return dots("Time of training", "", "seconds", rows)


def _memory(summary: Mapping[str, Any]) -> Chart:
    rows = [(row["label"], [row["peak_gb"]], None) for row in summary["rows"] if row["peak_gb"]]
    return dots("Peak memory", "The largest of the seeds.", "GB", rows)


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranked = [row for row in summary["rows"] if "rank" in row]
    return [(f"{row['rank']:.1f}", f"average rank, {row['label']}") for row in ranked[:4]]
