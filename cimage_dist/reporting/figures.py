"""Colours and letters of pages and figures, light and dark; and charts as files for papers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cimage_dist.io import artifacts
from cimage_dist.reporting.charts import Chart, Spec, drawn

_WIDTH = 320  # and the most of the height
_SCALE = 4  # of pixels in png files
_NAMES = ["bg", "card", "ink", "soft", "line", "accent", "low"]
_PALETTES = {
    "light": "#faf9f6 #ffffff #1f2429 #636c76 #e3e1da #0f766e #eef2f1",
    "dark": "#13161a #1b1f25 #e7e9ec #99a2ad #2d333b #2dd4bf #232a30",
}
_SERIES = {
    "light": "#0f766e #c2410c #4f46e5 #ca8a04 #be185d #0369a1 #4d7c0f #7e22ce #b91c1c #525252",
    "dark": "#2dd4bf #fb923c #a5b4fc #fbbf24 #f472b6 #38bdf8 #a3e635 #d8b4fe #f87171 #a3a3a3",
}
COLOURS = {
    scheme: dict(zip(_NAMES, palette.split(), strict=True)) for scheme, palette in _PALETTES.items()
}


def variables(scheme: str) -> str:
    """The colours as variables of a style sheet."""
    return " ".join(f"--{name}: {value};" for name, value in COLOURS[scheme].items())


def config(scheme: str, background: str = "transparent") -> dict[str, Any]:
    """The Vega-Lite config of a scheme."""
    colours, series = COLOURS[scheme], _SERIES[scheme].split()
    ink, soft, line = colours["ink"], colours["soft"], colours["line"]
    ramp = [colours["low"], colours["accent"]]
    words = {"labelColor": soft, "titleColor": soft, "titleFontWeight": "normal"}
    axis = {"gridColor": line, "domainColor": line, "tickColor": line, "labelOverlap": True}
    return {
        "background": background,
        "font": "system-ui, Helvetica, Arial, sans-serif",
        "view": {"stroke": None},
        "axis": words | axis | {"labelFontSize": 11, "titleFontSize": 11, "domain": False},
        "axisXBand": {"grid": False, "ticks": False},
        "axisYBand": {"grid": False, "ticks": False, "labelColor": ink},
        "legend": words | {"orient": "bottom", "labelFontSize": 11, "titleFontSize": 11},
        "range": {"category": series, "heatmap": ramp, "ramp": ramp},
        "mark": {"color": series[0]},
        "rule": {"color": ink},
        "text": {"color": ink, "fontSize": 11},
        "line": {"strokeWidth": 1.8},
        "style": {
            "soft": {"color": soft, "fillOpacity": 0.55},
            "on-pale": {"color": ink},
            "on-strong": {"color": colours["card"]},
        },
    }


def write_figures(
    charts: Sequence[Chart], folder: Path, kinds: Sequence[str] = ("pdf", "png", "svg")
) -> list[Path]:
    """A file of every kind for every chart but tables, named after the chart.

    A chart with choices gives one for every combination of them.
    """
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, spec in itertools.chain.from_iterable(map(_drawings, charts)):
        svg = vl_convert.vegalite_to_svg(spec, config=config("light", "white"))
        made = {"svg": lambda text: text.encode(), "pdf": vl_convert.svg_to_pdf}
        made["png"] = lambda text: vl_convert.svg_to_png(text, scale=_SCALE)
        for kind in kinds:
            written.append(folder / f"{name}.{kind}")
            artifacts.write_bytes(written[-1], made[kind](svg))
    return written


def _drawings(chart: Chart) -> Iterator[tuple[str, Spec]]:
    """(file name, specification) of a chart."""
    if chart["kind"] == "table":
        return
    for picked in itertools.product(*[options.items() for _, options in chart["choices"]]):
        words = [chart["title"], *[name for name, _ in picked]]
        encoding = {key: value for _, part in picked for key, value in part.items()}
        slug = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
        size = {"width": _WIDTH, "height": min(_WIDTH, chart["spec"]["height"]), "autosize": "pad"}
        yield slug, drawn(chart, encoding) | size
