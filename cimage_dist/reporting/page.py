"""A page from a title, facts, sentences and sections of charts: one HTML file without network.

Words and tables are plain HTML. Charts are drawn in the browser by Vega-Lite, whose script is taken
from the installed package vl-convert-python when the page is made.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from cimage_dist.io import artifacts
from cimage_dist.reporting.charts import Chart, drawn
from cimage_dist.reporting.figures import COLOURS, config, variables


def section(title: str, note: str, charts: Sequence[Chart]) -> dict[str, Any]:
    return {"title": title, "note": note, "charts": [chart for chart in charts if chart["data"]]}


def write_page(
    path: Path,
    title: str,
    about: str,
    verdict: Sequence[str],
    facts: Sequence[tuple[str, str]],
    sections: Sequence[dict[str, Any]],
) -> None:
    """`verdict`: what a reader should know first; `facts`: (value, what it is)."""
    shown = [part for part in sections if part["charts"]]
    plots = [chart for part in shown for chart in part["charts"] if chart["kind"] != "table"]
    data = {
        "themes": {scheme: config(scheme) for scheme in COLOURS},
        "charts": [
            {"spec": drawn(chart), "choices": [options for _, options in chart["choices"]]}
            for chart in plots
        ],
    }
    numbers = {id(chart): str(i) for i, chart in enumerate(plots)}
    assets = files("cimage_dist.reporting") / "assets"
    parts = {
        "LIGHT": variables("light"),
        "DARK": variables("dark"),
        "TITLE": escape(title),
        "ABOUT": escape(about),
        "VERDICT": _wrapped("ul", 'id="verdict"', [_tag("li", text) for text in verdict]),
        "FACTS": "".join(
            f"<div>{_tag('b', value)}{_tag('span', what)}</div>" for value, what in facts
        ),
        "CONTENTS": "".join(
            f'<a href="#s{i}">{escape(part["title"])}</a>' for i, part in enumerate(shown)
        ),
        "SECTIONS": "".join(_section(i, part, numbers) for i, part in enumerate(shown)),
        # Inside a script element only "</" could end it early.
        "DATA": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("</", "<\\/"),
        "ENGINE": _engine() if plots else "",
    }
    template = (assets / "page.html").read_text()
    template = template.replace("__STYLE__", (assets / "page.css").read_text())
    artifacts.write_text(path, re.sub(r"__([A-Z]+)__", lambda found: parts[found[1]], template))


@functools.cache
def _engine() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script; making it takes a second or two."""
    import vl_convert

    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return script.replace("</script", "<\\/script")


def _tag(name: str, text: str, attributes: str = "") -> str:
    return f"<{name}{attributes and ' '}{attributes}>{escape(text)}</{name}>" if text else ""


def _wrapped(name: str, attributes: str, parts: Sequence[str]) -> str:
    return f"<{name} {attributes}>{''.join(parts)}</{name}>" if parts else ""


def _section(number: int, part: dict[str, Any], numbers: dict[int, str]) -> str:
    cards = "".join(_card(chart, numbers.get(id(chart), "")) for chart in part["charts"])
    words = _tag("h2", part["title"]) + _tag("p", part["note"], 'class="note"')
    return f'<section id="s{number}">{words}<div class="grid">{cards}</div></section>'


def _card(chart: Chart, number: str) -> str:
    kind = f'class="card{" wide" if chart["is_wide"] else ""}" data-kind="{chart["kind"]}"'
    words = f"<h3>{escape(chart['title'])}</h3>" + _tag("p", chart["note"], 'class="note"')
    if chart["kind"] == "table":
        return f"<figure {kind}>{words}{_table(chart)}</figure>"
    choices = "".join(
        _choice(f"c{number}-{i}", label, list(options))
        for i, (label, options) in enumerate(chart["choices"])
    )
    return f'<figure {kind} data-chart="{number}">{words}{choices}<div class="plot"></div></figure>'


def _choice(name: str, label: str, options: Sequence[str]) -> str:
    """Radio buttons, the first one chosen."""
    made = [
        f'<label><input type="radio" name="{name}" value="{escape(option)}"'
        f"{'' if i else ' checked'}>{escape(option)}</label>"
        for i, option in enumerate(options)
    ]
    return f'<fieldset class="choices">{_tag("legend", label)}{"".join(made)}</fieldset>'


def _table(chart: Chart) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in chart["columns"])
    rows = "".join(f"<tr>{_cells(row, chart['bold'])}</tr>" for row in chart["data"])
    name = escape(chart["title"] or "table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(row: Sequence[str], bold: int | None) -> str:
    marks = ['class="bold"' if i == bold else "" for i in range(len(row))]
    return "".join(
        f"<td{mark and ' '}{mark}>{escape(text)}</td>"
        for text, mark in zip(row, marks, strict=True)
    )
