"""docs/RESULTS.md: what the tables say, then the tables, between two marks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cimage_dist.io import artifacts
from experiments.render import render_table
from experiments.spec import Table
from experiments.verdict import HOW_TO_READ, verdict

BEGIN, END = "<!-- bench: begin (python -m experiments --render) -->", "<!-- bench: end -->"
_HEAD = (
    "### What the tables say",
    "",
    f"Made from the files like the tables. {HOW_TO_READ}",
    "",
)


def document(tables: Sequence[Table], results: Path) -> str:
    begun = [
        table for table in tables if any(cell.path(results).is_file() for cell in table.cells())
    ]
    rest = [f"`{table.name}` ({table.title.lower()})" for table in tables if table not in begun]
    said = [f"- {sentence}" for sentence in verdict(begun, results)]
    lines = [line for table in begun for line in render_table(table, results)]
    return "\n".join(
        [*_HEAD, *said, "", *lines, *([f"Not begun: {', '.join(rest)}."] if rest else [])]
    ).strip()


def render_document(path: Path, tables: Sequence[Table], results: Path) -> None:
    """Replace the generated part."""
    head, rest = path.read_text().split(BEGIN)
    _, tail = rest.split(END)
    artifacts.write_text(path, f"{head}{BEGIN}\n\n{document(tables, results)}\n\n{END}{tail}")
