"""Colours and letters of pages and figures, light and dark."""

from __future__ import annotations

from typing import Any

_LIGHT = {
    "bg": "#faf9f6",
    "card": "#ffffff",
    "ink": "#1f2429",
    "soft": "#636c76",
    "line": "#e3e1da",
    "accent": "#0f766e",
    "low": "#eef2f1",
}
_DARK = {
    "bg": "#13161a",
    "card": "#1b1f25",
    "ink": "#e7e9ec",
    "soft": "#99a2ad",
    "line": "#2d333b",
    "accent": "#2dd4bf",
    "low": "#232a30",
}
_SERIES = {
    "light": "#0f766e #c2410c #4f46e5 #ca8a04 #be185d #0369a1 #4d7c0f #7e22ce #b91c1c #525252",
    "dark": "#2dd4bf #fb923c #a5b4fc #fbbf24 #f472b6 #38bdf8 #a3e635 #d8b4fe #f87171 #a3a3a3",
}
COLOURS = {"light": _LIGHT, "dark": _DARK}


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
