"""Sentences made from result files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp

from cimage_dist.eval.controls import (
    MARGIN,
    Comparison,
    Paired,
    equal,
    equivalence,
    of_differences,
    stands_out,
)
from experiments.spec import Table
from experiments.verdict import HOW_TO_READ, verdict

ROOT = Path(__file__).parents[2]


def table(rows: Sequence[str] = ("ours",), **changes: Any) -> Table:
    body: dict[str, Any] = {
        "title": "T",
        "note": "",
        "config": "configs/node/{dataset}.yaml",
        "seeds": {"cora": 4},
        "rows": {
            name: {"cora": (f"loss.cluster_weight={1 + at}",) if at else ()}
            for at, name in enumerate(rows)
        },
        "scores": {"node.test": "", "node.val": "validation"},
    }
    return Table(name="t", **(body | changes))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def fill(table: Table, results: Path, scores: dict[str, Sequence[float]], **more: Any) -> None:
    for cell in table.cells():
        row = next(name for name, found in table.rows.items() if found["cora"] == cell.overrides)
        path = cell.path(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {"seed": cell.seed, "node": {"test": scores[row][cell.seed], "val": 1.0}, **more}
            )
        )


def test_published_numbers_and_the_best_control(tmp_path):
    ours = table(controls=True, published={"ours": {"cora": [84.0, 50.0]}})
    fill(
        ours,
        tmp_path,
        {"ours": [80.0, 82.0, 81.0, 83.0]},
        controls={"raw": {"node": {"test": 60.0}}, "smoothed": {"node": {"test": 81.0}}},
    )
    half = float(t.ppf(0.975, 3)) * (5 / 3) ** 0.5 / 2
    assert verdict([ours], tmp_path) == [
        "T: Cora 81.50, 2.50 below the published 84.00.",
        f"T: Minus the best control, seed by seed: cora +0.50 [{0.5 - half:+.2f}, "
        f"{0.5 + half:+.2f}] (smoothed features).",
    ]
    assert verdict([ours], tmp_path / "nowhere") == []


def test_the_best_control_is_chosen_by_its_pool_score(tmp_path):
    ours = table(controls=True, published={"ours": {"cora": [84.0, 50.0]}})
    controls = {
        "smoothed": {"node": {"test": 82.0, "pool": 70.0}},
        "pagerank": {"node": {"test": 81.0, "pool": 75.0}},
    }
    fill(ours, tmp_path, {"ours": [80.0, 82.0, 81.0, 83.0]}, controls=controls)
    assert verdict([ours], tmp_path)[1].endswith("(features after PageRank).")


def test_rows_against_one(tmp_path):
    rows = table(("ours", "same", "worse"), against="ours")
    fill(
        rows,
        tmp_path,
        {
            "ours": [80.0, 82.0, 81.0, 83.0],
            "same": [81.0, 81.5, 81.5, 82.0],
            "worse": [70.0, 72.1, 71.0, 73.1],
        },
    )
    (said,) = verdict([rows], tmp_path)
    assert said.startswith(
        "T: 2 comparisons: 1 differs, 1 undecided; ours minus same: cora +0.00 ["
    )
    assert "] undecided; " in said and said.endswith(
        "]; ours minus worse: cora +9.95 [+9.86, +10.04] differs.".replace("]; ", "", 1)
    )
    (said,) = verdict([table(("ours", "same"), against="ours")], tmp_path)
    assert said.startswith("T: 1 comparison: 1 undecided; ours minus same: cora ")
    many = [f"row {at}" for at in range(9)]
    wide = table(("ours", "worse", *many), against="ours")
    noise = {name: [80.0 + at % 3, 81.0, 82.0, 83.0 - at % 2] for at, name in enumerate(many)}
    fill(
        wide,
        tmp_path,
        {"ours": [80.0, 82.0, 81.0, 83.0], "worse": [70.0, 72.1, 71.0, 73.1]} | noise,
    )
    assert verdict([wide], tmp_path) == [
        "T: 10 comparisons: 1 differs, 9 undecided; ours minus worse: cora +9.95 [+9.86, "
        "+10.04] differs."
    ], "of many only those that differ"


def test_holm_is_stricter_than_the_level_and_milder_than_bonferroni():
    comparisons = [
        Comparison("cora", str(at), Paired(5, 1.0, 1.0, p))
        for at, p in enumerate([0.011, 0.04, 0.03, 0.02, None])
    ]
    assert stands_out(comparisons) == [True, False, False, False, False], (
        "0.011 < 0.05 / 4, then 0.02 > 0.05 / 3"
    )
    comparisons[3] = Comparison("cora", "3", Paired(5, 1.0, 1.0, 0.016))
    assert stands_out(comparisons) == [True, False, False, True, False], (
        "0.016 < 0.05 / 3 but not 0.05 / 4"
    )


def test_rows_equal_within_the_margin(tmp_path):
    rows = table(("ours", "close"), against="ours")
    fill(rows, tmp_path, {"ours": [80.0, 82.0, 81.0, 83.0], "close": [80.1, 81.9, 81.1, 82.9]})
    (said,) = verdict([rows], tmp_path)
    assert said.startswith(
        "T: 1 comparison: 1 equal within 0.5 (TOST p<0.05); ours minus close: cora "
    )
    assert said.endswith("] equal within 0.5 (TOST p<0.05).")
    assert "TOST" in HOW_TO_READ and "public split" in HOW_TO_READ


def test_rows_over_graphs(tmp_path):
    graphs = ("cora", "citeseer", "pubmed", "photo", "computers")
    rows = table(("ours", "close"), against="ours")
    rows = dataclasses.replace(
        rows,
        seeds=dict.fromkeys(graphs, 3),
        rows={name: dict.fromkeys(graphs, found["cora"]) for name, found in rows.rows.items()},
    )
    gaps = dict(zip(graphs, (0.3, -0.2, 0.1, 0.0, -0.1), strict=True))
    for cell in rows.cells():
        path = cell.path(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The noise of three seeds hides what the graphs together show.
        score = 80.0 + (0.0 if cell.overrides else gaps[cell.dataset] + (cell.seed - 1) * 2.0)
        path.write_text(json.dumps({"seed": cell.seed, "node": {"test": score}}))
    (said,) = verdict([rows], tmp_path)
    assert "5 undecided" in said
    assert "over the 5 graphs, minus close +0.02 [-0.22, +0.26] equal within 0.5" in said


def test_tost_is_the_larger_of_two_one_sided_tests():
    gap = np.array([0.1, -0.2, 0.3, 0.15, 0.05])
    found = Paired(5, float(gap.mean()), float(gap.std(ddof=1) / 5**0.5), 0.5)
    above = ttest_1samp(gap, -MARGIN, alternative="greater").pvalue
    below = ttest_1samp(gap, MARGIN, alternative="less").pvalue
    assert equivalence(found) == pytest.approx(max(above, below))
    assert equivalence(Paired(2, 0.0, 0.1, None)) is None, "two seeds decide nothing"
    same, apart = of_differences([0.0, 0.0, 0.0]), of_differences([0.1, 0.1, 0.1])
    assert (same.p, equivalence(same)) == (1.0, 0.0)
    assert (apart.p, equivalence(apart)) == (None, None), "no spread to judge by"
    wide = Paired(5, 0.0, 1.0, 1.0)
    assert equal([Comparison("cora", "a", found), Comparison("cora", "b", wide)]) == [
        True,
        False,
    ], "no difference found is not equality"


def test_a_row_that_says_what_another_says_is_not_compared(tmp_path):
    rows = table(("ours", "worse"), against="ours")
    rows = dataclasses.replace(rows, rows=rows.rows | {"again": {"cora": ("data.name=cora",)}})
    fill(
        rows,
        tmp_path,
        {
            "ours": [80.0, 82.0, 81.0, 83.0],
            "worse": [70.0, 72.1, 71.0, 73.1],
            "again": [80.0, 82.0, 81.0, 83.0],
        },
    )
    (said,) = verdict([rows], tmp_path)
    assert said.startswith("T: 1 comparison: 1 differs") and "again" not in said


def test_controls_with_few_labels_are_chosen_by_their_pool_score(tmp_path):
    few = table(controls=True, scores={"few_labels.5.mean": ""})
    scored = {
        "smoothed": {"few_labels": {"5": {"mean": 75.0}}, "node": {"pool": 70.0}},
        "pagerank": {"few_labels": {"5": {"mean": 74.0}}, "node": {"pool": 75.0}},
    }
    fill(few, tmp_path, {"ours": [0.0] * 4}, controls=scored, few_labels={"5": {"mean": 76.0}})
    (said,) = verdict([few], tmp_path)
    assert "cora +2.00" in said and said.endswith("(features after PageRank).")


def test_few_labels(tmp_path):
    few = table(extra="low_labels", scores={"low_labels": ""})
    for cell in few.cells():
        path = cell.path(tmp_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {
                    "seed": cell.seed,
                    "low_labels": {
                        "1": {"ours": 70.0 + cell.seed, "gcn": 60.0 + cell.seed},
                        "10": {"ours": 80.0, "gcn": None},
                    },
                }
            )
        )
    assert verdict([few], tmp_path) == ["T: Cora, probe minus GCN +10.00 [+10.00, +10.00] at 1%."]
    for cell in few.cells():
        row = {"ours": 70.0 + cell.seed, "gcn": None, "pagerank": 69.0 + cell.seed}
        cell.path(tmp_path).write_text(json.dumps({"seed": cell.seed, "low_labels": {"1": row}}))
    assert verdict([few], tmp_path) == [
        "T: Cora, probe minus features after PageRank +1.00 [+1.00, +1.00] at 1%."
    ]
