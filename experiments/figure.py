"""The figure of the front page: ours minus the best control on each graph, a dot for each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cimage_dist.io.artifacts import value_at
from cimage_dist.reporting.page import COLOURS, config
from experiments.render import results_of
from experiments.spec import Table
from experiments.verdict import Gain, gains

_PANELS = {"ten": "all training labels", "ten_few": "five labels a class"}


def gain_svg(tables: Sequence[Table], results: Path) -> str:
    """An SVG that follows the reader's light or dark scheme, rows by falling gain."""
    import vl_convert

    shown = [table for table in tables if table.name in _PANELS]
    found = {table.name: gains(table, results) for table in shown}
    first = found[shown[0].name]
    order = sorted(first, key=lambda dataset: -first[dataset].gap.mean)
    panels = [
        _panel(_PANELS[table.name], _dots(table, results, found[table.name]), order)
        for table in shown
    ]
    for panel in panels[1:]:
        panel["encoding"]["y"]["axis"] = None
    # Readers' fonts may be wider than the one that was measured here: room for them.
    padding = {"left": 20, "right": 16, "top": 8, "bottom": 8}
    spec = {"hconcat": panels, "spacing": 24, "padding": padding}
    svg: str = vl_convert.vegalite_to_svg(spec, config=config("light", COLOURS["light"]["card"]))
    head, end, body = svg.partition(">")
    return f"{head}{end}<style>{_dark_rules()}</style>{body}\n"


def _dots(table: Table, results: Path, found: Mapping[str, Gain]) -> list[dict[str, Any]]:
    """A row for each seed, and one with `mean` for each graph, in points."""
    path, row = next(iter(table.scores)), next(iter(table.rows))
    dots: list[dict[str, Any]] = []
    for dataset, gain in found.items():
        dots.append({"graph": dataset, "mean": round(gain.gap.mean, 2)})
        for run in results_of(table, results, dataset, row):
            ours, control = value_at(run, path), value_at(run, f"controls.{gain.control}.{path}")
            if ours is not None and control is not None:
                dots.append({"graph": dataset, "gain": round(ours - control, 2)})
    return dots


def _panel(title: str, dots: list[dict[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    axis = {
        "title": "points above the best control",
        "grid": True,
        "format": "+~g",
        "labelExpr": "datum.value ? datum.label : '0'",
        "labelFlush": False,
    }

    def layer(mark: dict[str, Any], field: str) -> dict[str, Any]:
        x = {"field": field, "type": "quantitative", "axis": axis}
        keep = {"filter": f"isValid(datum.{field})"}
        return {"mark": mark, "transform": [keep], "encoding": {"x": x}}

    y = {"field": "graph", "type": "nominal", "title": None, "sort": list(order)}
    colours = COLOURS["light"]
    zero = {"data": {"values": [{}]}, "mark": "rule", "encoding": {"x": {"datum": 0}, "y": None}}
    return {
        "title": {
            "text": title,
            "color": colours["ink"],
            "fontSize": 12,
            "frame": "group",
            "anchor": "start",
        },
        "width": 280,
        "height": {"step": 20},
        "data": {"values": dots},
        "encoding": {"y": y},
        "layer": [
            zero,
            layer({"type": "circle", "size": 45, "opacity": 0.55}, "gain"),
            layer({"type": "tick", "thickness": 2.5, "size": 14, "color": colours["ink"]}, "mean"),
        ],
    }


def _dark_rules() -> str:
    """Style rules that replace the light colours where the reader prefers dark ones."""
    pairs = [(COLOURS["light"][name], dark) for name, dark in COLOURS["dark"].items()]
    rules = "".join(
        f'[{part}="{light}"]{{{part}:{dark}}}'
        for light, dark in pairs
        for part in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}"
