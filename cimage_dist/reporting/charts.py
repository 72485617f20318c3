"""Charts as Vega-Lite specifications, drawn on a page by a browser and to files by `figures`.

A chart is a dict: `kind`, `title`, `note`, `data` (rows; empty means nothing to draw), `spec` (the
Vega-Lite specification without its data) and `choices`, a list of (label, {option: encodings}) from
which a reader picks: the encodings of the chosen options are added to those of `spec`. A chart of
kind "table" has `columns` and `bold` in place of `spec`. Colours come from the theme.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Chart = dict[str, Any]
Spec = dict[str, Any]
Point = tuple[float, float | None]
_MOST_POINTS = 400
_MOST_TILTED = 30
_MOST_DOTTED = 40  # points of a curve up to which each is marked
# A method has the same colour on every chart.
METHODS = ("CIMAGE", "raw", "smoothed", "pagerank", "pca", "untrained")


def number(value: Any, digits: int = 5) -> float | None:
    """Short, and valid in JSON: None where it is not finite."""
    known = value is not None and math.isfinite(value)
    return float(f"{float(value):.{digits}g}") if known else None


def thinned(points: Sequence[Any], most: int = _MOST_POINTS) -> list[Any]:
    """Every n-th point and the last, at most about `most`."""
    step = max(1, -(-len(points) // most))
    return [*points[::step], *(points[-1:] if points and (len(points) - 1) % step else [])]


def chart(
    kind: str,
    title: str,
    note: str,
    data: Sequence[Mapping[str, Any]],
    height: int,
    choices: Sequence[tuple[str, Mapping[str, Spec]]] = (),
    is_wide: bool = False,
    **spec: Any,
) -> Chart:
    """Any chart; `spec` are the other parts of its specification."""
    fit = {"type": "fit-x", "contains": "padding", "resize": True}
    size = {"width": "container", "height": height, "autosize": fit, "description": title}
    about = {"kind": kind, "title": title, "note": note, "is_wide": is_wide}
    return about | {"data": list(data), "choices": list(choices), "spec": size | spec}


def quantity(field: str, title: str = "", **more: Any) -> Spec:
    """An axis of numbers that need not begin at 0."""
    scale = {"zero": False, "nice": True} | more.pop("scale", {})
    return {"field": field, "type": "quantitative", "title": title or None, "scale": scale} | more


def category(field: str, **more: Any) -> Spec:
    return {"field": field, "type": "nominal", "title": None} | more


def hover(name: str, field: str) -> Spec:
    """A parameter that holds the value of `field` under the pointer."""
    select = {"type": "point", "on": "pointerover", "clear": "pointerout", "fields": [field]}
    return {"name": name, "select": select}


def literal(name: str) -> str:
    """A column's name as Vega-Lite reads it: dots and brackets would be paths."""
    for sign in ("\\", ".", "[", "]"):
        name = name.replace(sign, "\\" + sign)
    return name


def lines(
    title: str,
    note: str,
    x: str,
    y: str,
    series: Mapping[str, Sequence[Point]],
    marks: Sequence[tuple[float, str]] = (),
) -> Chart:
    """Curves over a common axis; `marks` are vertical lines with a name."""
    drawn = {name: thinned(points) for name, points in series.items() if points}
    data: list[dict[str, Any]] = [
        {"series": name, "x": number(a), "y": number(b)}
        for name, points in drawn.items()
        for a, b in points
    ]
    is_dotted = max(map(len, drawn.values()), default=0) < _MOST_DOTTED
    colour = category("series", scale={"domain": list(drawn)})
    if len(drawn) == 1:
        colour["legend"] = None
    near = hover("near", "x")
    near["select"] |= {"nearest": True}
    seen = {"condition": {"param": "near", "empty": False, "value": 0.4}, "value": 0}
    values = [{"field": literal(name), "type": "quantitative", "title": name} for name in drawn]
    curve = {
        "mark": {"type": "line", "point": {"size": 22} if is_dotted else False},
        "encoding": {"y": quantity("y", y), "color": colour},
    }
    pointer = {
        "transform": [{"pivot": "series", "value": "y", "groupby": ["x"]}],
        "params": [near],
        "mark": "rule",
        "encoding": {"opacity": seen, "tooltip": [quantity("x", x), *values]},
    }
    every = [row["x"] for row in data] + [at for at, _ in marks]
    layers = [curve, pointer, *_vertical(marks, every)]
    return chart("lines", title, note, data, 220, layer=layers, encoding={"x": quantity("x", x)})


def _vertical(marks: Sequence[tuple[float, str]], every: Sequence[float | None]) -> list[Spec]:
    """A dashed line with its name for each mark, on the side where there is room."""
    known = [value for value in every if value is not None]
    layers: list[Spec] = []
    for at, label in marks:
        is_right = at > min(known) + 0.6 * (max(known) - min(known))
        text = {"align": "right" if is_right else "left", "dx": -5 if is_right else 5}
        name: Spec = {"mark": {"type": "text", "baseline": "top", **text}}
        name["encoding"] = {"text": {"field": "label"}, "y": {"value": 2}}
        layers.append(
            {
                "data": {"values": [{"at": number(at), "label": label}]},
                "encoding": {"x": {"field": "at", "type": "quantitative"}},
                "layer": [{"mark": {"type": "rule", "strokeDash": [3, 3]}}, name],
            }
        )
    return layers


def heat(
    title: str,
    note: str,
    x: str,
    y: str,
    columns: Sequence[Any],
    rows: Sequence[Any],
    values: Sequence[Sequence[float]],
    *,
    split: int = 0,
    text: bool = False,
) -> Chart:
    """A matrix in colours, from 0 to its largest value.

    `split` draws a divider after so many rows and columns, `text` writes the numbers.
    """
    data: list[dict[str, Any]] = [
        {"row": str(row), "column": str(column), "value": number(value, 4)}
        for row, found in zip(rows, values, strict=False)
        for column, value in zip(columns, found, strict=True)
    ]
    top = max((row["value"] or 0.0 for row in data), default=0.0) or 1.0
    shade = {"field": "value", "type": "quantitative", "scale": {"domain": [0, top]}}
    legend = None if text else {"title": None, "gradientLength": 120}
    titles = {"row": y, "column": x, "value": "value"}
    hints = [{"field": name, "title": shown} for name, shown in titles.items()]
    layers: list[Spec] = [
        {"mark": "rect", "encoding": {"color": shade | {"legend": legend}, "tooltip": hints}}
    ]
    has_room = {
        "expr": f"width / {max(1, len(columns))} < 22 ? 0 : 1"
    }  # the pointer shows them too
    for style, test in (("on-pale", "<="), ("on-strong", ">")) if text else ():
        layers.append(
            {
                "transform": [{"filter": f"datum.value {test} {0.55 * top}"}],
                "mark": {"type": "text", "style": style, "baseline": "middle", "opacity": has_room},
                "encoding": {"text": {"field": "value", "type": "quantitative"}},
            }
        )
    for axis, names in (("x", columns), ("y", rows)) if split else ():
        edge = {"datum": str(names[split]), "bandPosition": 0}
        along, end = ("x", "width") if axis == "y" else ("y", "height")
        other = {along: {"value": 0}, f"{along}2": {"value": end}}
        mark = {"type": "rule", "strokeDash": [3, 3]}
        layers.append({"data": {"values": [{}]}, "mark": mark, "encoding": {axis: edge} | other})
    axes: dict[str, Spec] = {
        "x": {"field": "column", "type": "ordinal", "title": x, "axis": _across(columns)},
        "y": {"field": "row", "type": "ordinal", "title": y},
    }
    for axis, names in (("x", columns), ("y", rows)):
        axes[axis]["scale"] = {"domain": [str(name) for name in names]}
    height = max(160, min(420, 24 * len(rows)))
    return chart("heat", title, note, data, height, layer=layers, encoding=axes)


def _across(names: Sequence[Any]) -> Spec:
    """The axis below a matrix: numbers that do not fit are dropped, names are tilted."""
    words = [str(name) for name in names]
    is_named = any(not word.lstrip("-").isdigit() for word in words)
    if not is_named or len(words) > _MOST_TILTED:
        return {"labelAngle": 0}
    return _tilted(words, -90) | {"labelBaseline": "middle", "labelLimit": 120}


def bars(
    title: str,
    note: str,
    y: str,
    categories: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    errors: Mapping[str, Sequence[float]] | None = None,
) -> Chart:
    """Groups of bars; `errors` are drawn as lines up and down."""
    data = []
    for name, values in series.items():
        spread = (errors or {}).get(name) or [0.0] * len(values)
        for group, value, error in zip(categories, values, spread, strict=True):
            if value is not None:
                ends = {"low": number(value - error), "high": number(value + error)}
                data.append({"group": group, "series": name, "value": number(value), **ends})
    shared = {
        "x": category("group", scale={"domain": list(categories)}, axis=_tilted(categories)),
        "xOffset": {"field": "series", "scale": {"domain": list(series)}},
        "tooltip": [{"field": name} for name in ("group", "series", "value")],
    }
    known = METHODS if set(series) <= set(METHODS) else list(series)
    legend = {"values": list(series)} if len(series) > 1 else None
    colour = category("series", scale={"domain": list(known)}, legend=legend)
    height = {"field": "value", "type": "quantitative", "title": y}
    layers = [{"mark": "bar", "encoding": {"y": height, "color": colour}}]
    if errors:
        lines = {"y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}
        layers.append({"mark": "rule", "encoding": lines})
    return chart("bars", title, note, data, 220, layer=layers, encoding=shared)


def _tilted(names: Sequence[str], angle: int = -35) -> Spec:
    """An axis whose names are tilted where they would not fit side by side."""
    is_tight = f"width < {7 * max(map(len, names), default=0) * len(names)}"
    turn = {"expr": f"{is_tight} ? {angle} : 0"}, {"expr": f"{is_tight} ? 'right' : 'center'"}
    return {"labelAngle": turn[0], "labelAlign": turn[1], "labelOverlap": False}


def dots(
    title: str, note: str, x: str, rows: Sequence[tuple[str, Sequence[float], float | None]]
) -> Chart:
    """Each row a name, its values and a published number, or None.

    Every value is a dot; a bar shows their mean and standard deviation.
    """
    data = [
        {"name": name, "values": [number(v) for v in values], "published": number(other)}
        for name, values, other in rows
        if values or other is not None
    ]
    if not any(row["values"] for row in data):
        data = []
    own, other = "seeds, mean ± std", "published"
    has_other = any(row["published"] is not None for row in data)
    colour = {"scale": {"domain": [own, other] if has_other else [own]}}
    flat: Spec = {"flatten": ["values"], "as": ["value"]}
    made = {"mean": "mean", "std": "stdevp"}
    stats = [{"op": op, "field": "value", "as": name} for name, op in made.items()]
    stats.append({"op": "count", "as": "seeds"})
    spread = [
        flat,
        {"aggregate": stats, "groupby": ["name"]},
        {"calculate": "datum.mean - datum.std", "as": "low"},
        {"calculate": "datum.mean + datum.std", "as": "high"},
    ]
    hints = [{"field": "name", "title": " "}] + [
        {"field": name, "type": "quantitative", "format": form}
        for name, form in (("mean", ".5~g"), ("std", ".3~g"), ("seeds", "d"))
    ]

    def layer(mark: str | Spec, field: str, what: str = own, **encoding: Any) -> Spec:
        place = quantity(field, x, scale={"padding": 8})
        named = {"x": place, "color": {"datum": what, "title": None, **colour}}
        return {"mark": mark, "encoding": named | encoding}

    band = {"type": "rule", "strokeWidth": 9, "strokeOpacity": 0.22}
    published = {"type": "point", "shape": "diamond", "size": 80, "strokeWidth": 1.8}
    wide = {"type": "rule", "strokeWidth": 22, "opacity": 0}  # what the pointer finds
    layers = [
        {"transform": spread, **layer(band, "low", x2={"field": "high"})},
        {"transform": [flat], **layer({"type": "circle", "size": 30, "opacity": 0.55}, "value")},
        {"transform": spread, **layer({"type": "tick", "thickness": 2.2, "size": 17}, "mean")},
        {"transform": spread, **layer(wide, "low", x2={"field": "high"}, tooltip=hints)},
    ]
    if has_other:
        hints = [{"field": "name", "title": " "}, {"field": "published"}]
        layers.append(layer(published, "published", other, tooltip=hints))
    names = category("name", scale={"domain": [row["name"] for row in data]})
    height = 26 * len(data)
    return chart("dots", title, note, data, height, layer=layers, encoding={"y": names})


def histogram(
    title: str,
    note: str,
    x: str,
    y: str,
    values: Sequence[float],
    marks: Sequence[tuple[float, str]] = (),
    bins: int = 24,
) -> Chart:
    """Counts of `values` in equal bins that also cover the marks."""
    import numpy as np

    ends = [*values, *(at for at, _ in marks)]
    limits = (min(ends), max(ends)) if ends else (0.0, 1.0)
    counts, edges = np.histogram(values, bins=bins, range=limits)
    cells = zip(edges, edges[1:], counts.tolist(), strict=False)
    data = [{"low": number(a), "high": number(b), "count": n} for a, b, n in cells]
    bar = {
        "mark": {"type": "bar", "style": "soft"},
        "encoding": {
            "x": quantity("low", x, bin="binned"),
            "x2": {"field": "high"},
            "y": {"field": "count", "type": "quantitative", "title": y},
            "tooltip": [category(name) | {"title": name} for name in ("low", "high", "count")],
        },
    }
    return chart("histogram", title, note, data, 220, layer=[bar, *_vertical(marks, limits)])


def table(
    title: str,
    note: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    bold: Sequence[Collection[int]] = (),
    footnotes: Sequence[str] = (),
) -> Chart:
    """`bold`: for each row the columns to stress; `footnotes` are folded away below."""
    head = {"kind": "table", "title": title, "note": note, "is_wide": len(columns) > 3}
    content = {"columns": list(columns), "data": [list(row) for row in rows], "bold": bold}
    return head | content | {"footnotes": list(footnotes)}


def drawn(chart: Chart, encoding: Mapping[str, Any] | None = None) -> Spec:
    """The whole specification, with its data and the encodings of the chosen options."""
    found: Spec = chart["spec"] | {"data": {"values": chart["data"]}}
    return found | {"encoding": found["encoding"] | dict(encoding)} if encoding else found
