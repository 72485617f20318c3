"""Results of the cells as rows: means, average ranks, and paired differences over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cimage_dist.baselines import METHODS, OWN, SUPERVISED
from cimage_dist.eval.statistics import CONTROLS, Comparison, paired, stands_out, value_at

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
    found, told = [], []
    for row in rows:
        others = [other for other in methods if other is not row]
        if not others or not row["scores"][by]:
            continue
        best = max(others, key=lambda other: other["scores"][by]["mean"])
        gap = paired(groups[row["name"]], groups[best["name"]], by)
        if gap is None:
            continue
        told.append(row)
        found.append(Comparison("", row["name"], gap))
        row["difference"] = {
            "to": best["label"],
            "mean": gap.mean,
            "error": gap.error,
            "interval": list(gap.interval),
            "p": gap.p,
            "seeds": gap.seeds,
        }
    for row, is_clear in zip(told, stands_out(found), strict=True):
        row["difference"]["stands_out"] = is_clear
