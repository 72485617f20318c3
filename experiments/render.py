"""Tables in Markdown from the result files, with published numbers beside ours and paired
comparisons over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.eval.controls import CONTROLS, paired
from cimage_dist.io.artifacts import value_at
from experiments.cell import read_result
from experiments.low_labels import RATIOS
from experiments.spec import RULER, Cell, Table

LOW_LABELS = {
    "ours": "CIMAGE, linear probe",
    "smoothed": "smoothed features, linear probe",
    "pagerank": "features after PageRank, linear probe",
    "gcn": "GCN, supervised",
}


def results_of(table: Table, results: Path, dataset: str, row: str) -> list[dict[str, Any]]:
    cells = [table.cell(dataset, row, seed) for seed in range(table.seeds[dataset])]
    return [read_result(cell.path(results)) for cell in cells if cell.path(results).is_file()]


def spread(values: Sequence[float | None]) -> str:
    """Mean ± standard deviation over seeds (population), with the number of seeds."""
    known = [v for v in values if v is not None]
    if len(known) < 2:
        return f"{known[0]:.2f} (1)" if known else "-"
    return f"{np.mean(known):.2f} ± {np.std(known):.2f} ({len(known)})"


def render_table(table: Table, results: Path) -> list[str]:
    datasets = list(table.seeds)
    lines = [
        f"### {table.title}",
        "",
        f"`python -m experiments {table.name}`. {table.note}".rstrip(),
        "",
    ]
    if table.extra == "low_labels":
        return [*lines, *_low_labels(table, results), *_origin(table, results), ""]
    heads = [
        f"{dataset} {label}".strip() for dataset in datasets for label in table.scores.values()
    ]
    lines += [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for row in table.rows:
        lines.append(f"| **{row}** | {' | '.join(_cells(table, results, row, datasets))} |")
        if row in table.published:
            lines.append(f"| {row}, published | {' | '.join(_published(table, row, datasets))} |")
    if table.controls:
        first = next(iter(table.rows))
        for control, name in CONTROLS.items():
            cells = [
                spread(
                    [
                        value_at(r, f"controls.{control}.{path}")
                        for r in results_of(table, results, d, first)
                    ]
                )
                for d in datasets
                for path in table.scores
            ]
            if set(cells) != {"-"}:
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", *_comparisons(table, results), *_origin(table, results), ""]


def published_at(table: Table, row: str, dataset: str, path: str) -> float | None:
    """The published number of one score; a single number is that of the first score."""
    found: Any = table.published.get(row, {}).get(dataset)
    at = list(table.scores).index(path)
    if isinstance(found, list):
        return found[at] if at < len(found) else None
    return found if at == 0 else None


def _cells(table: Table, results: Path, row: str, datasets: Sequence[str]) -> list[str]:
    return [
        spread([value_at(r, path) for r in results_of(table, results, dataset, row)])
        for dataset in datasets
        for path in table.scores
    ]


def _published(table: Table, row: str, datasets: Sequence[str]) -> list[str]:
    found = [
        published_at(table, row, dataset, path) for dataset in datasets for path in table.scores
    ]
    return ["-" if v is None else f"{v:.2f}" for v in found]


def _comparisons(table: Table, results: Path) -> list[str]:
    if table.against is None:
        return []
    first = next(iter(table.scores))
    lines = []
    for row in table.rows:
        if row == table.against:
            continue
        parts = []
        for dataset in table.seeds:
            if table.is_same_run(dataset, row, table.against):
                continue
            found = paired(
                results_of(table, results, dataset, table.against),
                results_of(table, results, dataset, row),
                first,
            )
            if found is not None:
                p = "" if found.p is None else f", p = {found.p:.3f}"
                parts.append(
                    f"{dataset} {found.mean:+.2f} ± {found.error:.2f} ({found.seeds} seeds{p})"
                )
        if parts:
            lines.append(f"- {table.against} minus {row}, seed by seed: {'; '.join(parts)}.")
    return (
        [
            *lines,
            "",
            "± is the standard error there, p the two-sided paired t-test; neither is corrected "
            "for the number of comparisons.",
            "",
        ]
        if lines
        else []
    )


def _low_labels(table: Table, results: Path) -> list[str]:
    percents = [f"{100 * ratio:g}" for ratio in RATIOS]
    lines = [
        f"| labelled nodes | {' | '.join(f'{p} %' for p in percents)} |",
        "|---|" + "---|" * len(percents),
    ]
    for dataset in table.seeds:
        found = results_of(table, results, dataset, next(iter(table.rows)))
        for key, name in LOW_LABELS.items():
            cells = [
                spread([value_at(r, f"low_labels.{p}.{key}") for r in found]) for p in percents
            ]
            if set(cells) != {"-"} or key == "ours":
                lines.append(f"| {dataset}, {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _origin(table: Table, results: Path) -> list[str]:
    """Where the numbers come from, and what is still missing."""
    cells = table.cells()
    there = [cell for cell in cells if cell.path(results).is_file()]
    found = [read_result(cell.path(results)) for cell in there]
    commits = sorted({str(result["commit"]) for result in found})
    earlier = sum(result.get("ruler", 1) != RULER for result in found)
    old = (
        f"; {earlier} of {len(found)} runs were scored by the earlier probe of 300 epochs"
        if earlier
        else ""
    )
    missing = (
        f"; {len(cells) - len(there)} of {len(cells)} runs are still to be made"
        if len(there) < len(cells)
        else ""
    )
    folders = ", ".join(
        f"`experiments/results/{task}/`" for task in dict.fromkeys(cell.task for cell in cells)
    )
    return [
        f"In brackets the number of seeds. Files: {folders}; commits "
        f"{', '.join(commits) or 'none'}{missing}{old}."
    ]


def outdated(cell: Cell, results: Path) -> bool:
    """Whether a result was made with another config than the one shipped now, or in another way."""
    path = cell.path(results)
    if not path.is_file():
        return False
    found = read_result(path)
    return (found["config_fingerprint"], found.get("recipe", 1), found.get("ruler", 1)) != (
        cell.config_fingerprint,
        cell.recipe,
        RULER,
    )
