"""What the tables say, in sentences made from the result files: against published numbers, against
controls, and row against row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cimage_dist.eval.controls import (
    CONTROLS,
    LEVEL,
    MARGIN,
    Comparison,
    Paired,
    equal,
    of_differences,
    paired,
    stands_out,
)
from cimage_dist.io.artifacts import value_at
from experiments.low_labels import RATIOS
from experiments.render import published_at, results_of
from experiments.spec import Table

HOW_TO_READ = (
    "In square brackets the 95 % interval of the mean difference, seed by seed, in points. "
    "Two rows differ when Holm's test over all comparisons of its table rejects equality at 5 "
    "%; they are equal within "
    f"{MARGIN:g} points when both one-sided paired t-tests (TOST) put the difference inside "
    f"±{MARGIN:g} (p < {LEVEL:g}, by Holm's test too); "
    "all others are undecided. Over the graphs: the same tests with the mean differences of the "
    "graphs as the sample. On Cora, Citeseer and Pubmed all seeds share the one public "
    "split: tests cover the noise of training on it, "
    "not that of other labels."
)
NARROW = ("pca", "untrained")  # controls of our width or less on every graph
_MOST_LISTED = 8
_ENOUGH_GRAPHS = 5
_FEW = {"gcn": "GCN", "smoothed": "smoothed features", "pagerank": "features after PageRank"}


def verdict(tables: Sequence[Table], results: Path) -> list[str]:
    said = []
    for table in tables:
        for sentence in (
            _against_published(table, results),
            _against_controls(table, results),
            _rows(table, results),
            _few(table, results),
        ):
            if sentence:
                said.append(
                    f"{table.title}{'' if table.title.endswith('?') else ':'} "
                    f"{sentence[0].upper()}{sentence[1:]}."
                )
    return said


def _means(table: Table, results: Path, row: str) -> Iterator[tuple[str, float]]:
    path = next(iter(table.scores))
    for dataset in table.seeds:
        values = [
            v
            for r in results_of(table, results, dataset, row)
            if (v := value_at(r, path)) is not None
        ]
        if values:
            yield dataset, float(np.mean(values))


def _against_published(table: Table, results: Path) -> str:
    if not table.controls or not table.published:
        return ""
    row = next(iter(table.rows))
    parts = []
    for dataset, mean in _means(table, results, row):
        other = published_at(table, row, dataset, next(iter(table.scores)))
        if other is not None:
            parts.append(
                f"{dataset} {mean:.2f}, {abs(mean - other):.2f} "
                f"{'above' if mean >= other else 'below'} the published {other:.2f}"
            )
    return "; ".join(parts)


class Gain(NamedTuple):
    """Ours minus the best control of one dataset; `ours` the mean over seeds."""

    ours: float
    control: str
    gap: Paired


def gains(table: Table, results: Path, among: Sequence[str] = tuple(CONTROLS)) -> dict[str, Gain]:
    """By dataset, seed by seed, against the best of some controls by the mean pool score; by the
    table's own score where a result has no pool score.
    """
    path, row = next(iter(table.scores)), next(iter(table.rows))
    found = {}
    for dataset in table.seeds:
        runs = results_of(table, results, dataset, row)
        controls: dict[str, list[dict[str, Any]]] = {
            c: [r["controls"][c] | {"seed": r["seed"]} for r in runs if c in r["controls"]]
            for c in among
            if all(r.get("controls") for r in runs)
        }
        is_by_pool = path.startswith(("node.", "few_labels.")) and all(
            value_at(r, "node.pool") is not None for rows in controls.values() for r in rows
        )
        by = "node.pool" if is_by_pool else path
        scored = {
            c: float(np.mean([value_at(r, by) or 0.0 for r in rows]))
            for c, rows in controls.items()
            if rows
        }
        if scored:
            best = max(scored, key=lambda c: scored[c])
            gap = paired(runs, controls[best], path)
            if gap is not None:
                ours = float(np.mean([value_at(r, path) for r in runs]))
                found[dataset] = Gain(ours, best, gap)
    return found


def _against_controls(table: Table, results: Path) -> str:
    if not table.controls or table.against is not None:
        return ""
    found = gains(table, results)
    parts = [f"{d} {_gap(g.gap)} ({CONTROLS[g.control]})" for d, g in found.items()]
    if not parts:
        return ""
    said = f"minus the best control, seed by seed: {'; '.join(parts)}"
    if len(found) < 6:
        return said
    return (
        f"{said}. Over the {len(found)} graphs: {summary(found)}; against the best control of our "
        f"width or less ({', '.join(CONTROLS[c] for c in NARROW)}): "
        f"{summary(gains(table, results, NARROW))}"
    )


def summary(found: Mapping[str, Gain]) -> str:
    if not found:
        return "no graph has results yet"
    means = [gain.gap.mean for gain in found.values()]
    lowest = min(found, key=lambda d: found[d].gap.mean)
    return (
        f"mean {np.mean(means):+.2f}, median {np.median(means):+.2f}, lowest {min(means):+.2f} "
        f"({lowest})"
    )


def _gap(found: Paired) -> str:
    low, high = found.interval
    return f"{found.mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _rows(table: Table, results: Path) -> str:
    if table.against is None:
        return ""
    path = next(iter(table.scores))
    comparisons = []
    for row in table.rows:
        for dataset in table.seeds:
            if table.is_same_run(dataset, row, table.against):
                continue
            found = paired(
                results_of(table, results, dataset, table.against),
                results_of(table, results, dataset, row),
                path,
            )
            if found is not None:
                comparisons.append(Comparison(dataset, row, found))
    if not comparisons:
        return ""
    said = _words(comparisons)
    listed = [
        (c, word)
        for c, word in zip(comparisons, said, strict=True)
        if len(comparisons) <= _MOST_LISTED or word == "differs"
    ]
    words = [f"{said.count(word)} {word}" for word in sorted(set(said))]
    counts = (
        f"{len(comparisons)} comparison{'s' if len(comparisons) > 1 else ''}: {', '.join(words)}"
    )
    by_row = {
        row: ", ".join(f"{c.dataset} {_gap(c.found)} {word}" for c, word in listed if c.row == row)
        for row in table.rows
    }
    parts = [f"{table.against} minus {row}: {gaps}" for row, gaps in by_row.items() if gaps]
    return "; ".join([counts, *parts, *_over_graphs(comparisons)])


def _over_graphs(comparisons: Sequence[Comparison]) -> list[str]:
    """Each row's mean difference over the graphs, where there are enough of them for a test."""
    by_row: dict[str, list[float]] = {}
    for c in comparisons:
        by_row.setdefault(c.row, []).append(c.found.mean)
    found = [
        Comparison("", row, of_differences(means))
        for row, means in by_row.items()
        if len(means) >= _ENOUGH_GRAPHS
    ]
    if not found:
        return []
    parts = [
        f"{c.row} {_gap(c.found)} {word}" for c, word in zip(found, _words(found), strict=True)
    ]
    return [f"over the {found[0].found.seeds} graphs, minus {', '.join(parts)}"]


def _words(comparisons: Sequence[Comparison]) -> list[str]:
    # A small difference can be both: not 0, and inside the margin.
    return [
        "differs" if c else f"equal within {MARGIN:g} (TOST p<{LEVEL:g})" if e else "undecided"
        for c, e in zip(stands_out(comparisons), equal(comparisons), strict=True)
    ]


def _few(table: Table, results: Path) -> str:
    if table.extra != "low_labels":
        return ""
    parts = []
    for dataset in table.seeds:
        found = results_of(table, results, dataset, next(iter(table.rows)))
        rows = {
            key: [
                {"seed": r["seed"], **{p: row.get(key) for p, row in r["low_labels"].items()}}
                for r in found
            ]
            for key in ("ours", *_FEW)
        }
        for key, name in _FEW.items():
            gaps = [
                (ratio, gap)
                for ratio in (RATIOS[0], RATIOS[-1])
                if (gap := paired(rows["ours"], rows[key], f"{100 * ratio:g}")) is not None
            ]
            if gaps:
                parts.append(
                    f"{dataset}, probe minus {name} "
                    f"{', '.join(f'{_gap(gap)} at {ratio:.0%}' for ratio, gap in gaps)}"
                )
    return "; ".join(parts)
