"""Charts on a page and in files: colours and letters, light and dark; figures for papers; a page
from a title, facts, sentences and sections of charts, one HTML file without network.

Words and tables are plain HTML. Charts are drawn in the browser by Vega-Lite, whose script is taken
from the installed package vl-convert-python when the page is made.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from cimage_dist import __version__
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


PAPER = "https://doi.org/10.1145/3701551.3703515"
# Before and after a map: what moves it, and where the picked node is described.
_FINDER = (
    '<form class="find"><label>find a node by its id <input type="search" name="id"></label>'
    '<button type="button" data-zoom="2" aria-label="zoom in">+</button>'
    '<button type="button" data-zoom="0.5" aria-label="zoom out">&minus;</button>'
    '<button type="button" data-zoom="0">whole map</button></form>',
    '<div class="picked note" aria-live="polite"></div>',
)


def section(title: str, note: str, charts: Sequence[Chart]) -> dict[str, Any]:
    return {"title": title, "note": note, "charts": [chart for chart in charts if chart["data"]]}


def write_page(
    path: Path,
    title: str,
    about: str,
    verdict: Sequence[str],
    facts: Sequence[tuple[str, str]],
    sections: Sequence[dict[str, Any]],
    introduction: str = "",
    glossary: Mapping[str, str] | None = None,
) -> None:
    """`verdict`: what a reader should know first; `facts`: (value, what it is); `glossary`: words
    of the page and what they mean.
    """
    shown = [part for part in sections if part["charts"]]
    plots = [chart for part in shown for chart in part["charts"] if chart["kind"] != "table"]
    data = {
        "themes": {scheme: config(scheme) for scheme in COLOURS},
        "charts": [
            {
                "spec": drawn(chart),
                "choices": [options for _, options in chart["choices"]],
                "near": chart.get("near"),
            }
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
        "INTRODUCTION": _tag("p", introduction, 'id="introduction"') + _glossary(glossary or {}),
        "FOOTER": _footer(),
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


def _glossary(words: Mapping[str, str]) -> str:
    terms = [_tag("dt", word) + _tag("dd", meaning) for word, meaning in words.items()]
    opened = '<details id="glossary"><summary>Words on this page</summary>'
    return f"{opened}<dl>{''.join(terms)}</dl></details>" if terms else ""


def _footer() -> str:
    """When and by what the page was made, with links to the project and the paper."""
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    links = {"the paper": PAPER}
    with suppress(PackageNotFoundError):
        for text in metadata("cimage-dist").get_all("Project-URL") or []:
            name, _, url = text.partition(", ")
            links = {name.lower(): url} | links
    shown = "".join(f' · <a href="{escape(url)}">{escape(name)}</a>' for name, url in links.items())
    return f"Made on {today} by cimage-dist {__version__}{shown}"


def _section(number: int, part: dict[str, Any], numbers: dict[int, str]) -> str:
    cards = "".join(_card(chart, numbers.get(id(chart), "")) for chart in part["charts"])
    words = _tag("h2", part["title"]) + _tag("p", part["note"], 'class="note"')
    return f'<section id="s{number}">{words}<div class="grid">{cards}</div></section>'


def _card(chart: Chart, number: str) -> str:
    kind = f'class="card{" wide" if chart["is_wide"] else ""}" data-kind="{chart["kind"]}"'
    words = f"<h3>{escape(chart['title'])}</h3>" + _tag("p", chart["note"], 'class="note"')
    if chart["kind"] == "table":
        notes = _wrapped("ul", 'class="note"', [_tag("li", text) for text in chart["footnotes"]])
        below = notes and f'<details class="more"><summary>What this is</summary>{notes}</details>'
        return f"<figure {kind}>{words}{_table(chart)}{below}</figure>"
    choices = "".join(
        _choice(f"c{number}-{i}", label, list(options))
        for i, (label, options) in enumerate(chart["choices"])
    )
    before, after = _FINDER if chart.get("near") else ("", "")
    plot = f'{choices}{before}<div class="plot"></div>{after}'
    return f'<figure {kind} data-chart="{number}">{words}{plot}</figure>'


def _choice(name: str, label: str, options: Sequence[str]) -> str:
    """Radio buttons, the first one chosen."""
    made = [
        f'<label><input type="radio" name="{name}" value="{escape(option)}"'
        f"{'' if i else ' checked'}>{escape(option)}</label>"
        for i, option in enumerate(options)
    ]
    return f'<fieldset class="choices">{_tag("legend", label)}{"".join(made)}</fieldset>'


def _table(chart: Chart) -> str:
    """On a narrow screen a table of many columns becomes a list, whose cells name their column."""
    columns = chart["columns"]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    bold = [*chart["bold"], *[()] * (len(chart["data"]) - len(chart["bold"]))]
    is_many = len(columns) > 3
    rows = "".join(
        f"<tr>{_cells(row, marks, columns if is_many else None)}</tr>"
        for row, marks in zip(chart["data"], bold, strict=True)
    )
    name = escape(chart["title"] or "table")
    many = ' class="many"' if is_many else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">'
        f"<table{many}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cells(row: Sequence[str], bold: Collection[int], names: Sequence[str] | None) -> str:
    cells = []
    for i, text in enumerate(row):
        mark = ' class="bold"' if i in bold else ""
        label = f' data-label="{escape(names[i])}"' if names and i else ""
        cells.append(f"<td{mark}{label}>{escape(text)}</td>")
    return "".join(cells)
