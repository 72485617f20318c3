"""report.html of the benchmark tables: every seed as a dot, published numbers beside them, and what
the comparisons say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cimage_dist.eval.controls import CONTROLS
from cimage_dist.io.artifacts import value_at
from cimage_dist.reporting.charts import Chart, dots, lines
from cimage_dist.reporting.page import section, write_page
from experiments.low_labels import RATIOS
from experiments.render import LOW_LABELS, published_at, results_of, spread
from experiments.spec import Table
from experiments.verdict import HOW_TO_READ, verdict


def write_tables_page(tables: Sequence[Table], results: Path) -> tuple[Path, list[Chart]]:
    """Write report.html beside the results; (its path, the charts on it)."""
    sections = [section(table.title, table.note, charts_of(table, results)) for table in tables]
    path = results / "report.html"
    made, wanted = _progress(tables, results)
    about = (
        f"{made} of {wanted} runs; from {results}; `python -m experiments` makes the missing ones"
    )
    write_page(
        path,
        "CIMAGE: tables of the paper, and ours",
        about,
        [*verdict(tables, results), HOW_TO_READ],
        _facts(tables, results),
        sections,
    )
    return path, [chart for part in sections for chart in part["charts"]]


def charts_of(table: Table, results: Path) -> list[Chart]:
    if table.extra == "low_labels":
        return [chart for dataset in table.seeds if (chart := _low_labels(table, results, dataset))]
    first, *rest = table.scores
    return [
        _dataset_chart(table, results, dataset, path)
        for dataset in table.seeds
        for path in (first, *(rest if table.extra else []))
    ]


def _dataset_chart(table: Table, results: Path, dataset: str, path: str) -> Chart:
    rows: list[tuple[str, list[float], float | None]] = []
    for row in table.rows:
        values = [value_at(result, path) for result in results_of(table, results, dataset, row)]
        rows.append(
            (row, [v for v in values if v is not None], published_at(table, row, dataset, path))
        )
    if table.controls:
        found = results_of(table, results, dataset, next(iter(table.rows)))
        for control, name in CONTROLS.items():
            values = [value_at(result, f"controls.{control}.{path}") for result in found]
            rows.append((name, [v for v in values if v is not None], None))
    label = table.scores[path]
    unit = "factors" if path.endswith("factors") else "percent"
    return dots(f"{table.title}: {dataset}{f', {label}' if label else ''}", "", unit, rows)


def _low_labels(table: Table, results: Path, dataset: str) -> Chart | None:
    found = results_of(table, results, dataset, next(iter(table.rows)))
    if not found:
        return None
    series: dict[str, list[tuple[float, float | None]]] = {}
    for key, name in LOW_LABELS.items():
        means = [
            [value_at(result, f"low_labels.{100 * ratio:g}.{key}") for result in found]
            for ratio in RATIOS
        ]
        known = [
            (100 * ratio, [v for v in values if v is not None])
            for ratio, values in zip(RATIOS, means, strict=True)
        ]
        points: list[tuple[float, float | None]] = [
            (percent, sum(values) / len(values)) for percent, values in known if values
        ]
        if points:
            series[name] = points
    return lines(
        f"{table.title}: {dataset}",
        f"Mean over {len(found)} seeds.",
        "percent of the nodes labelled",
        "test accuracy",
        series,
    )


def _progress(tables: Sequence[Table], results: Path) -> tuple[int, int]:
    paths = {cell.path(results) for table in tables for cell in table.cells()}
    return sum(path.is_file() for path in paths), len(paths)


def _facts(tables: Sequence[Table], results: Path) -> list[tuple[str, str]]:
    facts = []
    for table in tables:
        if table.name in ("node", "link"):
            path = next(iter(table.scores))
            for dataset in table.seeds:
                values = [
                    value_at(result, path)
                    for result in results_of(table, results, dataset, next(iter(table.rows)))
                ]
                if values:
                    facts.append(
                        (
                            spread(values).rpartition(" (")[0],
                            f"{dataset}, {table.scores[path] or 'test accuracy'}",
                        )
                    )
    return facts
