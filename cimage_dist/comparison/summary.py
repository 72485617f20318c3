"""Results of the cells as rows (means, average ranks, paired differences over seeds), and the rows
as a table for a terminal, as sentences, and as compare.html with every seed a dot.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cimage_dist.baselines import METHODS, OWN, SUPERVISED
from cimage_dist.eval.controls import CONTROLS, Comparison, paired, stands_out
from cimage_dist.io.artifacts import value_at
from cimage_dist.reporting.charts import dots, table
from cimage_dist.reporting.page import section, write_page

Result = dict[str, Any]
# path in a result -> (heading, digits), in the order in which they are shown
SCORES = {
    "node.test": ("accuracy", 2),
    "node.pool": ("pool", 2),
    "link.auc": ("AUC", 2),
    "link.ap": ("AP", 2),
    "cluster.nmi": ("NMI", 2),
    "cluster.modularity": ("modularity", 3),
}
_FIRST = {"node": "node.test", "link": "link.auc"}


def summarise(
    facts: Mapping[str, Any], names: Sequence[str], results: Sequence[Result]
) -> dict[str, Any]:
    """{**facts, "by": the score that ranks, "scores", "seeds", "rows", "failed"}.

    Rows: methods by average rank, then references, which are not ranked: GCN, the controls.
    """
    failed = [r for r in results if "error" in r]
    done = [r for r in results if "error" not in r]
    groups = {name: [r for r in done if r["method"] == name] for name in names}
    groups |= controls_of(groups.get(OWN, []))
    scores = [path for path in SCORES if any(value_at(r, path) is not None for r in done)]
    by = next((path for path in (_FIRST[facts["task"]], *scores) if path in scores), None)
    rows = [_row(name, found, scores) for name, found in groups.items() if found]
    if by is not None:
        _add_ranks(rows, groups, by)
        _add_differences(rows, groups, by)
    kinds = ("method", "reference", "control")
    rows.sort(key=lambda row: (kinds.index(row["kind"]), row.get("rank") or len(rows)))
    return {
        **facts,
        "by": by,
        "scores": scores,
        "seeds": sorted({r["seed"] for r in results}),
        "rows": rows,
        "failed": [{key: r[key] for key in ("method", "seed", "error")} for r in failed],
    }


def controls_of(ours: Sequence[Result]) -> dict[str, list[Result]]:
    """Scored with every seed of ours."""
    found: dict[str, list[Result]] = {name: [] for name in CONTROLS}
    for result in ours:
        for name, scores in result["controls"].items():
            found[name].append(scores | {"seed": result["seed"]})
    return found


def _row(name: str, found: Sequence[Result], scores: Sequence[str]) -> dict[str, Any]:
    kind = "method" if name in METHODS else "control"
    spreads = {path: _spread([value_at(r, path) for r in found]) for path in scores}
    if name == SUPERVISED:
        spreads["node.pool"] = None  # over nodes whose labels it was trained with
    return {
        "name": name,
        "label": METHODS[name].label if name in METHODS else CONTROLS[name],
        "kind": "reference" if name == SUPERVISED else kind,
        "seeds": [r["seed"] for r in found],
        "settings": found[0].get("settings"),
        "scores": spreads,
        "seconds": _spread([r.get("seconds") for r in found]),
        "peak_gb": max((r["peak_gb"] for r in found if r.get("peak_gb")), default=None),
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean, standard deviation over seeds (population) and the values themselves."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {"mean": float(np.mean(known)), "std": float(np.std(known)), "values": known}


def _add_ranks(rows: Sequence[dict[str, Any]], groups: Mapping[str, Any], by: str) -> None:
    """rank: mean over the seeds that all methods have; 1 is best, equal scores share a rank."""
    from scipy.stats import rankdata

    ranked = [row for row in rows if row["kind"] == "method" and row["scores"][by]]
    values = [_by_seed(groups[row["name"]], by) for row in ranked]
    common = sorted(set.intersection(*(set(found) for found in values))) if values else []
    if not common:
        return
    table = np.array([[found[seed] for seed in common] for found in values])
    for row, rank in zip(ranked, rankdata(-table, axis=0).mean(1), strict=True):
        row["rank"] = float(rank)


def _by_seed(results: Sequence[Result], path: str) -> dict[int, float]:
    found = {r["seed"]: value_at(r, path) for r in results}
    return {seed: value for seed, value in found.items() if value is not None}


def _add_differences(rows: Sequence[dict[str, Any]], groups: Mapping[str, Any], by: str) -> None:
    """difference: row minus the best other method (by its mean), seed by seed.

    `p` of the paired t-test, from 3 seeds on; `stands_out` by Holm's test over all rows.
    """
    methods = [row for row in rows if row["kind"] == "method" and row["scores"][by]]
    found, compared = [], []
    for row in rows:
        others = [other for other in methods if other is not row]
        if not others or not row["scores"][by]:
            continue
        best = max(others, key=lambda other: other["scores"][by]["mean"])
        gap = paired(groups[row["name"]], groups[best["name"]], by)
        if gap is None:
            continue
        compared.append(row)
        found.append(Comparison("", row["name"], gap))
        row["difference"] = {
            "to": best["label"],
            "mean": gap.mean,
            "error": gap.error,
            "interval": list(gap.interval),
            "p": gap.p,
            "seeds": gap.seeds,
        }
    for row, is_clear in zip(compared, stands_out(found), strict=True):
        row["difference"]["stands_out"] = is_clear


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
    names = (SCORES[path][0] for path in summary["scores"])
    heads = ["", *names, "rank", "minus best other", "seconds", "peak GB"]
    return heads, [_cells(row, summary["scores"]) for row in summary["rows"]]


def _cells(row: Mapping[str, Any], scores: Sequence[str]) -> list[str]:
    return [
        row["label"],
        *(_spread_text(row["scores"][path], SCORES[path][1]) for path in scores),
        f"{row['rank']:.1f}" if "rank" in row else "-",
        _difference(row.get("difference")),
        _spread_text(row["seconds"], 1),
        "-" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}",
    ]


def _spread_text(found: Mapping[str, Any] | None, digits: int) -> str:
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
    if changed := summary["changed"]:
        given = [f"{m}.{key}={value}" for m, part in changed.items() for key, value in part.items()]
        yield f"Not the settings that are shipped: {', '.join(given)}."
    yield "Seconds and peak memory are of training alone, each cell in a process of its own."


def _failures(summary: Mapping[str, Any]) -> list[str]:
    return [f"failed: {f['method']}, seed {f['seed']}: {f['error']}" for f in summary["failed"]]


Row = tuple[str, list[float], float | None]


def write_compare_page(path: Path, summary: Mapping[str, Any]) -> None:
    graph = summary["graph"]
    about = (
        f"{graph['nodes']:,} nodes, {graph['edges']:,} edges, {graph['features']:,} features; "
        f"{'edges held out for link prediction' if summary['task'] == 'link' else 'all edges seen'}"
    )
    charts = []
    for score in summary["scores"]:
        values = _values((row["label"], row["scores"][score]) for row in summary["rows"])
        unit = "modularity" if score == "cluster.modularity" else "percent"
        charts.append(dots(SCORES[score][0], "", unit, values))
    seconds = _values((row["label"], row["seconds"]) for row in summary["rows"])
    memory = [(row["label"], [row["peak_gb"]], None) for row in summary["rows"] if row["peak_gb"]]
    costs = [
        dots("Time of training", "", "seconds", seconds),
        dots("Peak memory", "The largest of the seeds.", "GB", memory),
    ]
    sections = [
        section("All methods", "", [table("", "", *cells(summary))]),
        section("Every seed a dot", "Methods by average rank, then references.", charts),
        section("What it costs", "Training alone.", costs),
    ]
    ranked = [row for row in summary["rows"] if "rank" in row]
    facts = [(f"{row['rank']:.1f}", f"average rank, {row['label']}") for row in ranked[:4]]
    write_page(path, f"Comparison on {graph['name']}", about, sentences(summary), facts, sections)


def _values(rows: Iterable[tuple[str, Mapping[str, Any] | None]]) -> list[Row]:
    return [(label, found["values"], None) for label, found in rows if found]
