"""A map of nodes: dots in one of several views, coloured by one of several properties, with zoom, a
search by id and the nearest neighbours of the node that is picked.

The page's script moves the window (x0, x1, y0, y1), picks a node (`focus`) and marks those near it
(`near`); views are scaled to the unit square so that one window serves all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cimage_dist.reporting.charts import Chart, Spec, category, chart, literal, number

WINDOW = (-0.03, 1.03, -0.03, 1.03)
_MOST_IN_LEGEND = 24
_UNKNOWN = "#8a8f9855"
_PICKED = "#ea580c"  # seen on light and on dark


def scatter(
    title: str,
    note: str,
    views: Mapping[str, Any],
    colours: Mapping[str, Chart],
    about: Sequence[str],
    names: Sequence[str],
    near: Mapping[str, Any] | None = None,
) -> Chart:
    """Points in one of several views ([n, 2] each), coloured by `classes` or `shades`.

    `about` is what the pointer shows of each point, `names` are their ids. `near`: {"names": of the
    points and after them of further nodes, "rows" [n, k]: positions in these names, the nearest
    first, "cosines" [n, k]}.
    """
    data: list[dict[str, Any]] = [
        {"id": name, "about": text} for name, text in zip(names, about, strict=True)
    ]
    for name, points in views.items():
        place = np.asarray(points, dtype=np.float64)
        low, high = place.min(axis=0), place.max(axis=0)
        place = (place - low) / np.where(high > low, high - low, 1.0)
        for row, (a, b) in zip(data, place.tolist(), strict=True):
            row |= {f"{name} x": number(a, 4), f"{name} y": number(b, 4)}
    for name, property in colours.items():
        for row, value in zip(data, property["values"], strict=True):
            row[name] = value
    places = {name: {axis: _side(f"{name} {axis}", axis) for axis in ("x", "y")} for name in views}
    shown = {name: {"color": _colour(name, property)} for name, property in colours.items()}
    size = 16 if len(data) > 1500 else 26 if len(data) > 500 else 44
    is_near, is_picked = "indexof(near, datum.id) >= 0", "datum.id === focus"
    picked = {"color": {"value": _PICKED}}
    ring = {"type": "point", "filled": False, "clip": True, "size": 4 * size, "strokeWidth": 2}
    layers: list[Spec] = [
        {
            "mark": {"type": "circle", "size": size, "opacity": 0.85, "clip": True},
            "encoding": {"tooltip": {"field": "about"}},
        },
        {"transform": [{"filter": is_near}], "mark": ring, "encoding": picked},
        {
            "transform": [{"filter": is_picked}],
            "mark": ring | {"size": 12 * size, "strokeWidth": 3},
            "encoding": picked,
        },
    ]
    params: list[Spec] = [
        {"name": name, "value": value}
        for name, value in zip(("x0", "x1", "y0", "y1"), WINDOW, strict=True)
    ]
    params += [{"name": "focus", "value": ""}, {"name": "near", "value": []}]
    latest = dict(reversed(places.items()))
    made = chart(
        "scatter",
        title,
        note,
        data,
        480,
        [("map", latest), ("colour", shown)],
        is_wide=True,
        params=params,
        layer=layers,
        encoding={},
    )
    return made | {"near": near}


def _side(field: str, axis: str) -> Spec:
    scale = {"zero": False, "nice": False, "domain": [{"expr": f"{axis}{i}"} for i in (0, 1)]}
    return {"field": field, "type": "quantitative", "axis": None, "scale": scale}


def classes(values: Sequence[int], names: Sequence[str] | None = None) -> Chart:
    """A property of few values; negative ones stand for unknown."""
    last = max(values, default=-1)
    known = [str(i) for i in range(last + 1)] if names is None else list(names)
    return {
        "type": "nominal",
        "values": [known[v] if v >= 0 else None for v in values],
        "domain": [known[v] for v in sorted({v for v in values if v >= 0})],
    }


def shades(values: Sequence[float], label: str) -> Chart:
    return {"type": "quantitative", "values": [number(v, 4) for v in values], "label": label}


def _colour(name: str, property: Chart) -> Spec:
    if property["type"] == "quantitative":
        legend = {"title": property["label"], "gradientLength": 180}
        return {"field": literal(name), "type": "quantitative", "legend": legend}
    seen = property["domain"]
    room = 34 + 7 * min(24, max(map(len, seen), default=0))
    columns = {"columns": {"expr": f"max(1, floor(width / {room}))"}, "labelLimit": room - 24}
    shown = category(
        literal(name),
        scale={"domain": seen},
        legend=columns if len(seen) <= _MOST_IN_LEGEND else None,
    )
    return {"condition": {"test": f"isValid(datum['{name}'])", **shown}, "value": _UNKNOWN}
