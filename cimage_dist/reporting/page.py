"""A page from a title, facts, sentences and sections of charts: one HTML file that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from cimage_dist.io import artifacts
from cimage_dist.reporting.charts import Chart, is_empty


def section(title: str, note: str, charts: Sequence[Chart]) -> dict[str, Any]:
    return {"title": title, "note": note, "charts": [chart for chart in charts if not is_empty(chart)]}


def write_page(path: Path, title: str, about: str, verdict: Sequence[str], facts: Sequence[tuple[str, str]], sections: Sequence[dict[str, Any]]) -> None:
    """`verdict`: what a reader should know first; `facts`: (value, what it is)."""
    assets = files("cimage_dist.reporting") / "assets"
    body = {"title": title, "about": about, "verdict": list(verdict), "facts": list(facts), "sections": [s for s in sections if s["charts"]]}
    # Inside a script element only "</" could end it early.
    data = json.dumps(body, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    parts = {"__STYLE__": (assets / "page.css").read_text(), "__SCRIPT__": (assets / "page.js").read_text(), "__TITLE__": html.escape(title), "__DATA__": data}
    page = (assets / "page.html").read_text()
    for name, content in parts.items():
        page = page.replace(name, content)
    artifacts.write_text(path, page)
