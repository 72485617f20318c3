"""docs/RESULTS.md: what the tables say, then the tables, between two marks; the front page's part
of it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from cimage_dist.eval.controls import CONTROLS
from cimage_dist.io import artifacts
from experiments.field import load_fields, render_field
from experiments.figure import gain_svg
from experiments.render import render_table
from experiments.spec import Table
from experiments.verdict import HOW_TO_READ, gains, summary, verdict

BEGIN, END = "<!-- bench: begin (python -m experiments --render) -->", "<!-- bench: end -->"
HEADLINE_BEGIN = "<!-- headline: begin (python -m experiments --render) -->"
HEADLINE_END = "<!-- headline: end -->"
FIGURE = "figures/gain.svg"  # beside the document
_HEAD = ("### What the tables say", "", f"Made from the files like the tables. {HOW_TO_READ}", "")


def document(tables: Sequence[Table], results: Path) -> str:
    begun = [
        table for table in tables if any(cell.path(results).is_file() for cell in table.cells())
    ]
    rest = [f"`{table.name}` ({table.title.lower()})" for table in tables if table not in begun]
    said = [f"- {sentence}" for sentence in verdict(begun, results)]
    lines = [line for table in begun for line in render_table(table, results)]
    lines += [line for field in load_fields() for line in render_field(field, results)]
    lines = [*_HEAD, *said, "", *lines, *([f"Not begun: {', '.join(rest)}."] if rest else [])]
    return "\n".join(map(_wrapped, lines)).strip()


def _wrapped(line: str) -> str:
    """Of at most 100 characters, unless it belongs to a table."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def headline(tables: Sequence[Table], results: Path) -> str:
    """Ours beside the best control on all graphs, with many labels and with five per class."""
    many, few = (next(t for t in tables if t.name == name) for name in ("ten", "ten_few"))
    by_many, by_few = gains(many, results), gains(few, results)
    lines = ["| graph | seeds | trained | best control | gain | gain, 5 labels a class |"]
    lines.append("|---|---|---|---|---|---|")
    for dataset, gain in by_many.items():
        other = gain.ours - gain.gap.mean
        lines.append(
            f"| {dataset} | {gain.gap.seeds} | {gain.ours:.1f} | "
            f"{other:.1f} ({CONTROLS[gain.control]}) | {gain.gap.mean:+.1f} | "
            f"{by_few[dataset].gap.mean:+.1f} |"
        )
    lines += ["", f"Gain over the graphs: {summary(by_many)}; with five labels a class:"]
    return "\n".join([*lines, f"{summary(by_few)}."])


def _between(text: str, begin: str, end: str, made: str) -> str:
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n\n{made}\n\n{end}{tail}"


def render_document(path: Path, tables: Sequence[Table], results: Path) -> None:
    """Replace the generated parts: of the document, and the headline of a README above it with its
    figure.
    """
    artifacts.write_text(path, _between(path.read_text(), BEGIN, END, document(tables, results)))
    readme = path.parent.parent / "README.md"
    if readme.is_file() and HEADLINE_BEGIN in readme.read_text():
        made = headline(tables, results)
        artifacts.write_text(
            readme, _between(readme.read_text(), HEADLINE_BEGIN, HEADLINE_END, made)
        )
        artifacts.write_text(path.parent / FIGURE, gain_svg(tables, results))
