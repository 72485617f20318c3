"""The page of the benchmark tables, from made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.reporting.page import write_figures
from experiments.__main__ import main
from experiments.page import charts_of, write_tables_page
from experiments.spec import Table
from tests.pages import LOOKS, looked_at

ROOT = Path(__file__).parents[2]


def table(name: str, **changes: Any) -> Table:
    body: dict[str, Any] = {
        "title": f"The {name} table",
        "note": "Made up.",
        "config": "configs/node/{dataset}.yaml",
        "seeds": {"cora": 4, "citeseer": 4},
        "rows": {
            "ours": {"cora": (), "citeseer": ()},
            "changed": {"cora": ("loss.cluster_weight=0",), "citeseer": ("loss.cluster_weight=0",)},
        },
        "scores": {"node.test": "test", "node.val": "validation"},
        "published": {"ours": {"cora": 84.4, "citeseer": [70.0, 1.0]}},
        "against": "ours",
        "controls": True,
    }
    return Table(name=name, **(body | changes))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def results(tmp_path) -> Path:
    for cell in table("node").cells():
        score = 83.0 + cell.seed + (-2.0 - 0.1 * cell.seed if cell.overrides else 0.0)
        found = {
            "seed": cell.seed,
            "config_fingerprint": cell.config_fingerprint,
            "node": {"test": score, "val": score - 1},
            "controls": {"raw": {"node": {"test": 60.0}}},
        }
        found["low_labels"] = {p: {"ours": 70.0, "gcn": 60.0 + cell.seed} for p in ("10", "1")}
        for extra in ("", "~low_labels"):
            path = tmp_path / (cell.folder + extra) / f"seed-{cell.seed}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
    return tmp_path


def test_every_seed_is_a_dot(results):
    cora, citeseer = charts_of(table("node"), results)
    assert [row["name"] for row in cora["data"]] == ["ours", "changed", "raw features"], (
        "a control nobody measured has no row"
    )
    assert cora["data"][0] == {
        "name": "ours",
        "values": [83.0, 84.0, 85.0, 86.0],
        "published": 84.4,
    }
    assert citeseer["data"][0]["published"] == 70.0 and cora["data"][1]["published"] is None
    assert charts_of(table("node"), results / "nowhere")[0]["data"] == [], (
        "published numbers alone are no chart"
    )


def test_few_labels_are_curves(results):
    (chart, _) = charts_of(table("low_labels", extra="low_labels"), results)
    drawn: dict[str, list[tuple[float, float]]] = {}
    for row in chart["data"]:
        drawn.setdefault(row["series"], []).append((row["x"], row["y"]))
    assert drawn == {
        "CIMAGE, linear probe": [(1.0, 70.0), (10.0, 70.0)],
        "GCN, supervised": [(1.0, 61.5), (10.0, 61.5)],
    }


def test_the_page_begins_with_the_verdict(results):
    path, _ = write_tables_page([table("node")], results)
    assert "The node table: Cora 84.50, 0.10 above the published 84.40" in path.read_text()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_in_a_browser(results, browser, width, scheme):
    path, charts = write_tables_page(
        [table("node"), table("low_labels", extra="low_labels")], results
    )
    assert looked_at(browser, path, width, scheme) == {chart["title"] for chart in charts}
    assert {chart["kind"] for chart in charts} == {"dots", "lines"}


def test_the_command(results, tmp_path, capsys):
    words = ["node", "--page", "--results", str(results), "--figures", str(tmp_path / "figures")]
    assert main(words) == 0
    assert "report.html" in capsys.readouterr().out and (results / "report.html").is_file()
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert "node-classification-cora.pdf" in names
    assert len(write_figures(charts_of(table("node"), results), tmp_path / "more")) == 6
