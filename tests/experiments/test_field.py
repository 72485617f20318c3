"""The field's tables: ranks, cost, distance to published numbers, and a run of it."""

from __future__ import annotations

import json

import pytest

from cimage_dist.baselines import METHODS
from cimage_dist.train.progress import Progress
from experiments.field import (
    Field,
    average_ranks,
    load_fields,
    main,
    make,
    render_field,
    results_of,
)

TABLE = Field("f", "Title", "Note.", "configs/node/{dataset}.yaml", "node.test", {"a": 2, "b": 2})


def write(results, dataset, method, *scores, **more):
    folder = TABLE.folder(results, dataset) / method
    if method == "cimage":
        folder = results / "node" / dataset / "as-shipped"
    folder.mkdir(parents=True)
    for seed, score in enumerate(scores):
        cell = {"method": method, "seed": seed, "node": {"test": score}, "cpu_seconds": 2.0}
        cell |= {"peak_gb": 0.5, "commit": "abc", "controls": {}} | more
        (folder / f"seed-{seed}.json").write_text(json.dumps(cell))


def test_ranks_are_over_graphs_that_all_methods_have(tmp_path):
    for dataset, ours, theirs in (("a", 80.0, 70.0), ("b", 60.0, 75.0)):
        write(tmp_path, dataset, "cimage", ours, ours + 1)
        write(tmp_path, dataset, "gae", theirs, theirs + 2)
    write(tmp_path, "a", "gcn", 99.0, 99.0)
    found = {d: results_of(TABLE, tmp_path, d) for d in TABLE.seeds}
    assert average_ranks(TABLE, found) == ({"cimage": 1.5, "gae": 1.5}, ["a", "b"])
    write(tmp_path, "a", "dgi", 90.0)
    found = {d: results_of(TABLE, tmp_path, d) for d in TABLE.seeds}
    assert average_ranks(TABLE, found) == ({"cimage": 2.0, "gae": 3.0, "dgi": 1.0}, ["a"])


def test_the_table_says_what_follows(tmp_path):
    assert render_field(TABLE, tmp_path) == []
    scores = {"raw": {"node": {"test": 50.0}}}
    write(tmp_path, "a", "cimage", 80.0, 81.0, controls=scores)
    write(tmp_path, "a", "gae", 70.0, 72.0)
    write(tmp_path, "a", "gcn", 79.0)
    table = Field(
        **vars(TABLE)
        | {
            "published": {"gae": {"a": 74.0}, "cimage": {"a": 81.9}},
            "settings": {"a": {"gae": {"epochs": 5}}},
            "left_out": {"a": {"mvgrl": "too slow", "arga": "too large", "dgi": "too slow"}},
        }
    )
    text = "\n".join(render_field(table, tmp_path))
    assert "| **CIMAGE** | 80.50 ± 0.50 (2) | 81.90 | 1.0 |" in text
    assert "| GAE | 71.00 ± 1.00 (2)† | 74.00 | 2.0 |" in text
    assert "| GCN | 79.00 ± 0.00 (1) |  |  |" in text
    assert "| raw features | 50.00 ± 0.00 (2) |  |  |" in text
    assert "CIMAGE is number 1 of 2" in text and "CIMAGE minus GAE" in text and "a +9.50" in text
    assert "below the published number: GAE on a (-3.0)." in text
    assert "† on a: GAE epochs 5" in text
    assert "| MVGRL | (a) |  |  |" in text and "| DGI | (a) |" in text and "| ARGA | (b) |" in text
    assert "- (a): not run, too slow.\n- (b): not run, too large." in text
    assert "| GAE | 2, 0.50 |" in text and "commits abc" in text


def test_graphs_without_a_rank_say_who_is_ahead(tmp_path):
    write(tmp_path, "a", "cimage", 80.0)
    write(tmp_path, "a", "gae", 70.0)
    write(tmp_path, "a", "dgi", 75.0)
    write(tmp_path, "b", "gae", 90.0)
    write(tmp_path, "b", "cimage", 89.0)
    text = "\n".join(render_field(TABLE, tmp_path))
    assert "Not ranked, the best of those that ran: b GAE 90.00, CIMAGE 89.00." in text
    assert "CIMAGE minus" not in text  # one seed has no interval


def test_our_row_is_made_of_the_runs_of_the_other_tables(tmp_path):
    write(tmp_path, "a", "cimage", 80.0, 81.0, 82.0, seconds=7.0, peak_rss_gb=0.25)
    write(tmp_path, "a", "gae", 70.0, 72.0)
    found = results_of(TABLE, tmp_path, "a")["cimage"]
    assert [r["node"]["test"] for r in found] == [80.0, 81.0]  # two seeds, as of the others
    assert not make(TABLE, tmp_path, tmp_path, ["a"], ["cimage"], None, 1, Progress(quiet=True))


def test_shipped_tables_name_methods_and_graphs_that_exist():
    tables = load_fields()
    assert [table.name for table in tables] == ["node_field", "link_field"]
    for table in tables:
        named = [*table.published, *(m for part in table.settings.values() for m in part)]
        named += [m for part in table.left_out.values() for m in part]
        assert set(named) <= set(METHODS)
        for part in (*table.published.values(), table.settings, table.left_out):
            assert set(part) <= set(table.seeds)
        assert "gcn" in table.methods("cora") or table.score == "link.auc"


def test_a_cell_is_made_once(tmp_path, monkeypatch):
    from cimage_dist.comparison.cell import run_cell
    from experiments import field

    config = tmp_path / "a.yaml"
    config.write_text(
        f"data:\n  name: sbm\n  store_dir: {tmp_path}\n  sbm:\n    num_nodes: 120\n"
        "    num_blocks: 3\n"
    )
    table = Field(
        **vars(TABLE)
        | {
            "config": str(tmp_path / "{dataset}.yaml"),
            "seeds": {"a": 1},
            "settings": {"a": {"gae": {"epochs": 2}}},
        }
    )
    made = []

    def here(cell, quiet, stage):
        made.append(cell.method)
        return run_cell(cell, Progress(quiet=True), stage)

    monkeypatch.setattr(field, "in_own_process", here)
    for _ in range(2):
        assert not make(
            table, tmp_path, tmp_path / "runs", ["a"], ["gae"], None, 1, Progress(quiet=True)
        )
    assert made == ["gae"]
    (cell,) = results_of(table, tmp_path, "a")["gae"]
    assert cell["settings"]["epochs"] == 2 and "commit" in cell


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nothing"], "no table 'nothing'"), (["node_field", "--datasets", "x"], "no graph 'x'")],
)
def test_unknown_names(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err
