"""Descriptions of charts as plain values. The page draws them in the browser, `figures` with matplotlib; both see the same numbers.

A chart is a dict with `kind`, `title`, `note` and the fields of its kind. Numbers that are not finite are given as None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Chart = dict[str, Any]
Point = tuple[float, float | None]
_MOST_POINTS = 400


def number(value: Any, digits: int = 5) -> float | None:
    """Short, and valid in JSON."""
    return float(f"{float(value):.{digits}g}") if value is not None and math.isfinite(value) else None


def thinned(points: Sequence[Any], most: int = _MOST_POINTS) -> list[Any]:
    """Every n-th point and the last, at most about `most`."""
    step = max(1, -(-len(points) // most))
    return [*points[::step], *(points[-1:] if points and (len(points) - 1) % step else [])]


def lines(title: str, note: str, x: str, y: str, series: Mapping[str, Sequence[Point]], marks: Sequence[tuple[float, str]] = ()) -> Chart:
    """Curves over a common axis; `marks` are vertical lines with a name."""
    drawn = [{"name": name, "points": [[number(a), number(b)] for a, b in thinned(points)]} for name, points in series.items() if points]
    return {"kind": "lines", "title": title, "note": note, "x": x, "y": y, "series": drawn, "marks": [{"x": a, "label": text} for a, text in marks]}


def heat(
    title: str, note: str, x: str, y: str, columns: Sequence[Any], rows: Sequence[Any], values: Sequence[Sequence[float]], *, split: int = 0, text: bool = False
) -> Chart:
    """A matrix in colours, from 0 to its largest value; `split` draws a divider after so many rows and columns, `text` writes the numbers."""
    cells = [[number(v, 4) for v in row] for row in values]
    return {
        "kind": "heat", "title": title, "note": note, "x": x, "y": y, "columns": [str(c) for c in columns], "rows": [str(r) for r in rows],
        "values": cells, "split": split, "text": text,
    }  # fmt: skip


def scatter(title: str, note: str, views: Mapping[str, Sequence[Sequence[float]]], colours: Mapping[str, Chart], hover: Sequence[str]) -> Chart:
    """Points in one of several views, coloured by one of several properties (see `classes` and `shades`)."""
    placed = {name: [[number(a, 4), number(b, 4)] for a, b in points] for name, points in views.items()}
    return {"kind": "scatter", "title": title, "note": note, "views": placed, "colours": colours, "hover": list(hover)}


def classes(values: Sequence[int], names: Mapping[int, str] | None = None) -> Chart:
    """A property of few values; negative ones stand for unknown."""
    return {"type": "class", "values": [int(v) for v in values], "names": {str(k): v for k, v in (names or {}).items()}}


def shades(values: Sequence[float], label: str) -> Chart:
    return {"type": "shade", "values": [number(v, 4) for v in values], "label": label}


def bars(
    title: str, note: str, y: str, categories: Sequence[str], series: Mapping[str, Sequence[float | None]], errors: Mapping[str, Sequence[float]] | None = None
) -> Chart:
    drawn = [{"name": name, "values": [number(v) for v in values], "errors": list((errors or {}).get(name, []))} for name, values in series.items()]
    return {"kind": "bars", "title": title, "note": note, "y": y, "categories": list(categories), "series": drawn}


def dots(title: str, note: str, x: str, rows: Sequence[tuple[str, Sequence[float], float | None]]) -> Chart:
    """Each row a name, its values (a dot each, their mean and spread as a bar) and a published number, or None."""
    drawn = [{"name": name, "values": [number(v) for v in values], "published": number(other)} for name, values, other in rows if values or other is not None]
    return {"kind": "dots", "title": title, "note": note, "x": x, "rows": drawn if any(row["values"] for row in drawn) else []}


def histogram(title: str, note: str, x: str, y: str, values: Sequence[float], marks: Sequence[tuple[float, str]] = (), bins: int = 24) -> Chart:
    """Counts of `values` in equal bins that also cover the marks."""
    import numpy as np

    ends = [*values, *(a for a, _ in marks)]
    counts, edges = np.histogram(values, bins=bins, range=(min(ends), max(ends)) if ends else (0.0, 1.0))
    shown = [{"x": number(a), "label": text} for a, text in marks]
    return {"kind": "histogram", "title": title, "note": note, "x": x, "y": y, "edges": [number(e) for e in edges], "counts": counts.tolist(), "marks": shown}


def table(title: str, note: str, columns: Sequence[str], rows: Sequence[Sequence[str]], bold: int | None = None) -> Chart:
    """`bold`: a column to stress."""
    return {"kind": "table", "title": title, "note": note, "columns": list(columns), "rows": [list(row) for row in rows], "bold": bold}


def is_empty(chart: Chart) -> bool:
    """Nothing to draw: such a chart is left out of a page."""
    parts = {"lines": "series", "heat": "values", "scatter": "hover", "bars": "categories", "dots": "rows", "histogram": "counts", "table": "rows"}
    return not chart[parts[chart["kind"]]]
