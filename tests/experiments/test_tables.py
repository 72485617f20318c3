"""Tables from yaml: what is refused, which runs are needed and shared, how results become rows, and
a small table end to end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.errors import UserError
from experiments.document import document
from experiments.render import paired, render_table, spread
from experiments.run import missing
from experiments.spec import Table, load_table, load_tables
from tests.experiments.conftest import write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"colour": 1}, "unknown key 'colour'"),
        ({"title": None}, "title is missing"),
        ({"rows": None}, "rows is missing"),
        (
            {"rows": {"shipped": ["loss.cluster_weight"]}},
            "rows.shipped must be a list of key=value",
        ),
        ({"rows": {"shipped": ["loss.cluster_wait=1"]}}, "cluster_wait"),
        ({"against": "other"}, "against is 'other'"),
        ({"published": {"other": {"blocks": 1.0}}}, "published.other is no row"),
        ({"seeds": {"blocks": 0}}, "seeds.blocks=0"),
        ({"seeds": {"nothing": 1}}, "configs/node/nothing.yaml"),
        ({"rows": ["shipped"]}, "rows, seeds and configs must map"),
        ({"configs": {"other": "configs/node/{dataset}.yaml"}}, "configs.other is no dataset"),
        ({"extra": "colours"}, "extra is 'colours'"),
    ],
)
def test_a_wrong_table_is_refused_before_anything_runs(project, changes, said):
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        load_table(write(project, **changes))


def test_shipped_tables_load(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables = load_tables(Path("experiments/tables"))
    assert [t.name for t in tables][:4] == ["node", "link", "link_parts", "ten"]
    by_name = {t.name: t for t in tables}
    same = next(
        c
        for c in by_name["workers"].cells()
        if c.dataset == "cora" and "train.epochs=30" in c.overrides
    )
    assert same.folder == "node/cora/as-shipped", "the same run as in the main table"
    ten, appendix = by_name["ten"], by_name["appendix"]
    assert len(ten.seeds) == 10 and ten.config_of("acm") == "configs/own/acm.yaml"
    assert {c.folder for c in by_name["node"].cells()} < {c.folder for c in ten.cells()}, (
        "runs are shared"
    )
    assert {c.folder for c in by_name["ten_few"].cells()} == {c.folder for c in ten.cells()}
    assert {c.task for c in appendix.cells()} == {"paper-node"}, (
        "apart from the runs of configs/node"
    )
    whole = {c.folder for c in by_name["parts"].cells()} & {
        c.folder for c in by_name["partition"].cells()
    }
    assert len(whole) == len(by_name["partition"].seeds), "the whole objective is trained once"


def test_some_datasets_may_have_another_config(project):
    (project / "configs/own").mkdir()
    (project / "configs/own/mine.yaml").write_text(
        (project / "configs/node/blocks.yaml").read_text()
    )
    own = {"mine": "configs/own/{dataset}.yaml"}
    table = load_table(write(project, seeds={"blocks": 1, "mine": 1}, configs=own, published=None))
    assert {c.folder for c in table.cells() if not c.overrides} == {
        "node/blocks/as-shipped",
        "own/mine/as-shipped",
    }
    fill(table, project / "results", "shipped", [80.0, 90.0])
    text = "\n".join(render_table(table, project / "results"))
    assert "Files: `experiments/results/node/`, `experiments/results/own/`;" in text


def test_settings_that_are_refused_one_by_one(project):
    """Turning off the only loss is refused; with another turned on it is a row like others."""
    off = [f"loss.{name}_weight=0" for name in ("redundancy", "structure", "factor")]
    table = load_table(
        write(project, rows={"shipped": [], "modularity alone": [*off, "loss.cluster_weight=1"]})
    )
    name = next(c.folder for c in table.cells() if c.overrides)
    assert "loss.redundancy_weight=0" in name and "loss.structure_weight=0" in name


def test_tables_share_runs_and_early_seeds_come_first(project):
    first = load_table(write(project))
    second = load_table(
        write(
            project,
            "other",
            rows={"again": [], "more": ["loss.cluster_weight=0.3"]},
            against=None,
            published=None,
        )
    )
    cells = missing([first, second], project / "results")
    assert len(cells) == 6 and [c.seed for c in cells] == [0, 0, 0, 1, 1, 1]


def result(seed: int, test: float, raw: float = 50.0) -> dict[str, Any]:
    return {
        "seed": seed,
        "node": {"val": 1.0, "test": test},
        "controls": {"raw": {"node": {"test": raw}}},
        "commit": "abc",
        "config_fingerprint": "x",
    }


def fill(table: Table, folder: Path, row: str, scores: list[float]) -> None:
    wanted = {d: (*table.common, *table.rows[row][d]) for d in table.seeds}
    for cell, score in zip(
        [c for c in table.cells() if c.overrides == wanted[c.dataset]], scores, strict=False
    ):
        path = cell.path(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result(cell.seed, score)))


def test_a_table_in_markdown(project):
    table = load_table(write(project, seeds={"blocks": 4}))
    assert "Not begun: `small`" in document([table], project / "results")
    fill(table, project / "results", "shipped", [80.0, 82.0, 81.0, 83.0])
    fill(table, project / "results", "with clusters", [79.0, 80.0, 80.5])
    text = "\n".join(render_table(table, project / "results"))
    assert "| **shipped** | 81.50 ± 1.12 (4) |" in text and "| shipped, published | 12.34 |" in text
    assert "| raw features | 50.00 ± 0.00 (4) |" in text
    assert "untrained encoder" not in text, "no row for a control without results"
    assert (
        "shipped minus with clusters, seed by seed: blocks +1.17 ± 0.44 (3 seeds, p = 0.118)"
        in text
    )
    assert (
        "1 of 8 runs are still to be made" in text
        and "7 of 7 runs were scored by the earlier probe" in text
    )


def test_settings_of_all_rows_belong_to_every_cell(project):
    table = load_table(write(project, common=["loss.factor_weight=0"]))
    fill(table, project / "results", "shipped", [80.0, 82.0])
    assert "| **shipped** | 81.00 ± 1.00 (2) |" in "\n".join(
        render_table(table, project / "results")
    )


def test_paired_differences():
    from scipy.stats import ttest_1samp

    ours, other = (
        [result(s, v) for s, v in enumerate([3.0, 4.0, 6.0, 5.0])],
        [result(s, v) for s, v in enumerate([1.0, 3.5, 4.0])],
    )
    found = paired(ours, other, "node.test")
    assert found is not None and found.seeds == 3 and found.mean == pytest.approx(1.5)
    assert found.p == pytest.approx(float(ttest_1samp([2.0, 0.5, 2.0], 0).pvalue))
    assert paired(ours[:1], other[:1], "node.test") is None
    same = paired(ours[:3], ours[:3], "node.test")
    assert same is not None and same.mean == 0 and same.p == 1
    assert spread([None]) == "-" and spread([1.0, None, 3.0]) == "2.00 ± 1.00 (2)"


def test_rows_may_differ_by_dataset(project):
    seeds = {"blocks": 1, "more": 1}
    (project / "configs/node/more.yaml").write_text(
        (project / "configs/node/blocks.yaml").read_text()
    )
    rows = {
        "shipped": [],
        "weighted": {"blocks": ["loss.cluster_weight=0.3"], "more": "loss.cluster_weight=0.4"},
    }
    table = load_table(write(project, seeds=seeds, rows=rows, published=None, against=None))
    assert [(c.dataset, c.overrides) for c in table.cells()] == [
        ("blocks", ()),
        ("blocks", ("loss.cluster_weight=0.3",)),
        ("more", ()),
        ("more", ("loss.cluster_weight=0.4",)),
    ]
    fill(table, project / "results", "weighted", [80.0, 90.0])
    assert "| **weighted** | 80.00 (1) | 90.00 (1) |" in "\n".join(
        render_table(table, project / "results")
    )
    with pytest.raises(UserError, match=r"rows\.weighted has nothing for more"):
        load_table(
            write(
                project,
                seeds=seeds,
                rows=rows | {"weighted": {"blocks": []}},
                published=None,
                against=None,
            )
        )
