"""The table of a comparison, for a terminal, and what it says in sentences."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cimage_dist.comparison.summary import SCORES

_WIDTH = 180  # where no terminal gives one: nothing is cut


def as_text(summary: Mapping[str, Any], width: int = _WIDTH) -> str:
    from rich.console import Console
    from rich.table import Table

    graph = summary["graph"]
    title = f"{graph['name']}: {graph['nodes']:,} nodes, {graph['edges']:,} edges"
    table = Table(title=title)
    heads, rows = cells(summary)
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=not at)
    for at, row in enumerate(rows):
        nexts = summary["rows"][at + 1 : at + 2]
        is_last = bool(nexts) and summary["rows"][at]["kind"] != nexts[0]["kind"]
        table.add_row(*row, end_section=is_last)
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get() + "\n".join(sentences(summary))


def terminal_width() -> int:
    return shutil.get_terminal_size((_WIDTH, 24)).columns


def cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) of text."""
    heads = [
        "",
        *(SCORES[path][0] for path in summary["scores"]),
        "rank",
        "minus best other",
        "seconds",
        "peak GB",
    ]
    return heads, [_cells(row, summary["scores"]) for row in summary["rows"]]


def _cells(row: Mapping[str, Any], scores: Sequence[str]) -> list[str]:
    return [
        row["label"],
        *(_spread(row["scores"][path], SCORES[path][1]) for path in scores),
        f"{row['rank']:.1f}" if "rank" in row else "-",
        _difference(row.get("difference")),
        _spread(row["seconds"], 1),
        "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}",
    ]


def _spread(found: Mapping[str, Any] | None, digits: int) -> str:
    if found is None:
        return "-"
    spread = f" ± {found['std']:.{digits}f}" if len(found["values"]) > 1 else ""
    return f"{found['mean']:.{digits}f}{spread}"


def _difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    p = "" if found["p"] is None else f", p = {found['p']:.3f}"
    return f"{found['mean']:+.2f} ± {found['error']:.2f}{p}{' *' * found['stands_out']}"


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """What the table says, how to read it, and what failed."""
    return [*verdict(summary), *how_to_read(summary), *_failures(summary)]


def verdict(summary: Mapping[str, Any]) -> Iterator[str]:
    ranked = [row for row in summary["rows"] if "rank" in row]
    if not ranked or summary["by"] is None:
        return
    best, name = ranked[0], SCORES[summary["by"]][0]
    rank = f"average rank {best['rank']:.1f} of {len(ranked)}"
    mean = best["scores"][summary["by"]]["mean"]
    yield f"Best by {name}: {best['label']}, {mean:.2f}, {rank}."
    gap = best.get("difference")
    if gap is not None:
        low, high = gap["interval"]
        yield (
            f"{best['label']} minus {gap['to']}, seed by seed: {gap['mean']:+.2f} "
            f"[{low:+.2f}, {high:+.2f}] over {gap['seeds']} seeds; "
            f"{'they differ' if gap['stands_out'] else 'undecided'}."
        )
    controls = [row for row in summary["rows"] if row["kind"] == "control"]
    if controls:
        # Not by test scores where labels outside the test nodes can choose.
        has_pool = summary["by"] == "node.test" and "node.pool" in summary["scores"]
        chosen_by = "node.pool" if has_pool else summary["by"]
        top = max(controls, key=lambda row: row["scores"][chosen_by]["mean"])
        mean, gap = top["scores"][summary["by"]]["mean"], top.get("difference")
        beside = f", {gap['mean']:+.2f} beside {gap['to']}" if gap else ""
        yield f"Best control, which needs no training: {top['label']}, {mean:.2f}{beside}."


def how_to_read(summary: Mapping[str, Any]) -> Iterator[str]:
    seeds = len(summary["seeds"])
    if summary["by"] is None:
        return
    name = SCORES[summary["by"]][0]
    over = f"Mean ± standard deviation over {seeds} seed{'s' * (seeds != 1)}"
    yield f"{over}, percent except modularity; rank and differences by {name} on test data."
    if any("difference" in row for row in summary["rows"]):
        yield (
            "Minus best other: mean ± standard error of the paired differences to the best other "
            "method, p of the paired t-test (from 3 seeds on), * where Holm's test over all rows "
            "rejects equality at 5 %."
        )
    if not summary["has_labels"]:
        yield f"Modularity is of {summary['clusters']} clusters by k-means on each embedding."
    yield "Seconds and peak memory are of training alone, each cell in a process of its own."


def _failures(summary: Mapping[str, Any]) -> list[str]:
    return [f"failed: {f['method']}, seed {f['seed']}: {f['error']}" for f in summary["failed"]]
