"""`cimage compare`: what is refused, a comparison from end to end, resuming, failing, no labels."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cimage_dist
from cimage_dist import baselines
from cimage_dist import comparison as comparing
from cimage_dist.__main__ import main
from cimage_dist.baselines import Fitted, gae
from cimage_dist.baselines.encoders import ORDERS
from cimage_dist.comparison import compare
from cimage_dist.comparison.cell import Cell, in_this_process, method_graph
from cimage_dist.comparison.summary import as_text, summarise
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.splits import training_graph
from cimage_dist.errors import UserError
from cimage_dist.pipeline.stages import node_split_or_reason
from cimage_dist.train.progress import Progress
from tests.cli.conftest import TRAINING
from tests.conftest import small_sbm_settings

SHORT = {"ccassg": {"epochs": 3, "width": 16}, "gae": {"epochs": 3}}
SETS = [f"--set={m}.{key}={value}" for m, part in SHORT.items() for key, value in part.items()]
QUIET = Progress(quiet=True)
here = functools.partial(compare, progress=QUIET, execute=in_this_process)


@pytest.fixture(scope="session")
def cfg(store_dir: Path) -> Config:
    return load_config(overrides=[*small_sbm_settings(store_dir), *TRAINING])


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command line, without a process for every cell, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "compare", here)


def own_folder(folder: Path, with_labels: bool = True) -> list[str]:
    """120 nodes in two blocks as csv files; its settings."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    edges = rng.integers(0, 120, (1200, 2))
    edges = edges[labels[edges[:, 0]] == labels[edges[:, 1]]]
    folder.mkdir()
    np.savetxt(folder / "edges.csv", edges, fmt="%d", delimiter=",")
    features = rng.poisson(2, (120, 5)) + labels[:, None]
    np.savetxt(folder / "features.csv", features, fmt="%d", delimiter=",")
    if with_labels:
        np.savetxt(folder / "labels.csv", labels, fmt="%d")
    return ["data.name=mine", f"data.path={folder}", *TRAINING]


def rows_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in summary["rows"]}


def test_every_method_has_settings_for_both_tasks():
    for name in baselines.METHODS:
        if name != baselines.OWN:
            for task in ("node", "link"):
                settings = baselines.settings_of(name, "unheard-of", task)
                assert settings["epochs"] >= 1 and settings["normalize"] in {"none", *ORDERS}


def test_settings_are_layered():
    assert baselines.settings_of("ccassg", "citeseer", "node")["epochs"] == 20
    assert baselines.settings_of("bandana", "cora", "node")["hidden"] == 256
    assert baselines.settings_of("bandana", "cora", "link")["hidden"] == 128
    assert baselines.settings_of("bandana", "citeseer", "link")["layers"] == 1
    assert baselines.settings_of("gae", "cora", "node")["width"] == 128
    assert baselines.settings_of("gae", "cora", "link")["width"] == 16
    changed = baselines.settings_of("bandana", "cora", "link", {"hidden": 8, "lr": "1e-3"})
    assert changed["hidden"] == 8 and changed["lr"] == 1e-3 and changed["layers"] == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"epoch": 3}, "Did you mean 'epochs'"),
        ({"epochs": "many"}, "gae.epochs must be of type int"),
        ({"epochs": 1.5}, "gae.epochs must be of type int"),
        ({"epochs": True}, "gae.epochs must be of type int"),
        ({"normalize": 3}, "gae.normalize must be of type str"),
    ],
)
def test_wrong_settings_are_told(overrides, message):
    with pytest.raises(UserError, match=message):
        baselines.settings_of("gae", "cora", "node", overrides)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "gae,cca-sg"], "Did you mean 'ccassg'"),
        (["--methods", "gae,mvgrl"], "mvgrl takes graphs of at most 100 nodes, this one has 120"),
        (["--methods", "gae", "--seeds", "0"], "at least 1"),
        (["--methods", "gae", "--set", "gae.epoch=3"], "Did you mean 'epochs'"),
        (["--methods", "gae", "--set", "gae=3"], "METHOD.KEY=VALUE"),
        (["--methods", "gae", "--set", "dgi.epochs=3"], "not among the methods"),
        (["--methods", "cimage", "--set", "cimage.epochs=3"], "train.epochs=50"),
    ],
)
def test_mistakes_end_before_anything_trains(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    limited = baselines.METHODS["mvgrl"]._replace(most_nodes=100)
    monkeypatch.setitem(baselines.METHODS, "mvgrl", limited)
    settings = own_folder(tmp_path / "graph")
    assert main(["compare", *settings, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "comparisons").exists()


def test_the_supervised_reference_needs_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = own_folder(tmp_path / "graph", with_labels=False)
    assert main(["compare", *settings, "--methods", "gae,gcn"]) == 2
    assert "gcn is trained with labels" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in baselines.METHODS)
    assert "cimage compare configs/" in out


def test_end_to_end_in_processes_of_their_own(cfg, tmp_path):
    """One seed, as a person would: then a second seed keeps the cells of the first."""
    names = ["cimage", "ccassg", "gae"]
    found = cimage_dist.compare(cfg, names, 1, out=tmp_path, settings=SHORT, progress=QUIET, jobs=2)
    assert not found.failed and found.summary["by"] == "node.test"
    rows = rows_of(found.summary)
    assert {row["kind"] for row in rows.values()} == {"method", "control"}
    assert sorted(rows[name]["rank"] for name in names) == pytest.approx([1, 2, 3], abs=0.5)
    for name in names:
        cell = json.loads((tmp_path / name / "seed-0.json").read_text())
        assert 0 <= cell["node"]["test"] <= 100 and 0 < cell["node"]["pool"] <= 100
        assert cell["seconds"] > 0 and 0.05 < cell["peak_gb"] < 8
        assert cell["link"] is None if name == "cimage" else "link" not in cell
        assert -1 < cell["cluster"]["modularity"] < 1

    made: list[str] = []

    def counting(cell: Cell, quiet: bool, stage: str) -> dict[str, Any]:
        made.append(f"{cell.method} {cell.seed}")
        return in_this_process(cell, quiet, stage)

    again = compare(cfg, names, 2, out=tmp_path, settings=SHORT, progress=QUIET, execute=counting)
    assert made == ["cimage 1", "ccassg 1", "gae 1"]
    gap = rows_of(again.summary)["gae"]["difference"]
    assert gap["seeds"] == 2 and gap["p"] is None
    assert rows_of(again.summary)["raw"]["seeds"] == [0, 1]
    text = str(again)
    assert "CCA-SSG" in text and "raw features" in text and "Best by accuracy" in text
    page = (tmp_path / "compare.html").read_text()
    assert "CCA-SSG" in page and "http://" not in page.split("<script")[0]
    assert json.loads((tmp_path / "compare.json").read_text()) == again.summary

    changed = SHORT | {"gae": {"epochs": 4}}
    made.clear()
    compare(cfg, names, 1, out=tmp_path, settings=changed, progress=QUIET, execute=counting)
    assert made == ["gae 0"]


def test_a_failing_method_does_not_stop_the_others(tmp_path, monkeypatch, capsys, in_process):
    def fit(*args: object) -> Fitted:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(gae, "fit", fit)
    words = ["compare", *own_folder(tmp_path / "graph"), "--methods", "gae,ccassg", *SETS]
    assert main([*words, "--seeds", "1"]) == 1
    out = capsys.readouterr().out
    assert "failed: gae, seed 0: RuntimeError: no such luck" in out and "CCA-SSG" in out
    failed = json.loads((tmp_path / "comparisons/mine/gae/seed-0.json").read_text())
    assert failed["error"] == "RuntimeError: no such luck"

    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparing, "compare", here)
    assert main([*words, "--seeds", "1"]) == 0


def test_own_folder_by_the_command_line(tmp_path, capsys, in_process):
    words = ["compare", *own_folder(tmp_path / "graph"), "--methods", "cimage,gae", "--seeds", "3"]
    assert main([*words, "--set=gae.epochs=3", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["graph"]["name"] == "mine" and summary["seeds"] == [0, 1, 2]
    assert summary["raw_features"] is True and summary["task"] == "node"
    assert rows_of(summary)["gae"]["settings"]["epochs"] == 3
    page = (tmp_path / "comparisons/mine/compare.html").read_text()
    assert "Not the settings that are shipped: gae.epochs=3." in page


def test_without_labels_links_and_modularity(tmp_path, capsys, in_process):
    settings = own_folder(tmp_path / "graph", with_labels=False)
    words = ["compare", *settings, "eval.controls=false", "--methods", "cimage,ccassg,gae"]
    assert main([*words, *SETS, "--seeds", "1"]) == 0
    assert "AUC" in capsys.readouterr().out
    summary = json.loads((tmp_path / "comparisons/mine-link/compare.json").read_text())
    assert summary["scores"] == ["link.auc", "link.ap", "cluster.modularity"]
    assert summary["by"] == "link.auc" and summary["clusters"] >= 2 and not summary["has_labels"]
    cell = json.loads((tmp_path / "comparisons/mine-link/gae/seed-0.json").read_text())
    assert cell["node"] is None and cell["link"]["scorer"] and cell["link"]["val_auc"] > 0


def test_a_method_sees_no_test_label_and_no_held_out_edge(cfg):
    held = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, holdout_edges="link"))
    graph = open_graph(held.data)
    topology, links = training_graph(graph, held.data, 0)
    given = method_graph(graph, topology, held)
    split, _ = node_split_or_reason(graph, held)
    assert split is not None and links is not None and given.y is not None
    assert bool((given.y[split.test] == -1).all()) and bool((given.y[split.train] >= 0).all())
    keys = given.edge_index[0] * graph.num_nodes + given.edge_index[1]
    for pairs in (links.val_pos, links.test_pos):
        for a, b in ((0, 1), (1, 0)):
            assert not bool(torch.isin(pairs[:, a] * graph.num_nodes + pairs[:, b], keys).any())


def test_features_raw_or_as_stored(cfg, tmp_path):
    """Methods get raw rows where they can be had; a scaled store is reported."""
    scaled = open_graph(cfg.data)
    _, ours, make_raw = comparing._open(cfg, cfg)
    raw, is_raw = make_raw()
    assert is_raw and not np.allclose(raw.x, scaled.x) and np.allclose(ours.x, scaled.x)
    _, ours, make_raw = comparing._open(scaled, cfg)
    assert make_raw() == (ours, False)
    stored = dataclasses.replace(cfg.data, name="stored", path=str(scaled.path))
    _, _, make_raw = comparing._open(dataclasses.replace(cfg, data=stored), cfg)
    assert make_raw()[1] is False
    _, ours, make_raw = comparing._open(raw.to_data(), cfg)
    assert np.allclose(make_raw()[0].x, raw.x) and np.allclose(ours.x, scaled.x, atol=1e-6)
    with pytest.raises(UserError, match="got int"):
        here(3)


def test_ranks_and_differences():
    def cell(method: str, seed: int, value: float) -> dict[str, Any]:
        facts = {"method": method, "seed": seed, "seconds": 1.0, "peak_gb": 0.5, "settings": {}}
        return facts | {"node": {"test": value, "pool": value}}

    scores = {"gae": [80.0, 81.0, 82.0], "dgi": [84.0, 84.5, 86.2], "gcn": [90.0, 90.0, 90.0]}
    results = [cell(m, s, v) for m, values in scores.items() for s, v in enumerate(values)]
    results.append({"method": "grace", "seed": 0, "error": "none"})
    graph = {"name": "g", "nodes": 5, "edges": 6, "features": 2, "classes": 2}
    facts = {"graph": graph, "task": "node", "has_labels": True, "clusters": None}
    facts["changed"] = {"gae": {"epochs": 5}}
    summary = summarise(facts, [*scores, "grace"], results)
    rows = rows_of(summary)
    assert [row["name"] for row in summary["rows"]] == ["dgi", "gae", "gcn"]
    assert rows["dgi"]["rank"] == 1 and rows["gae"]["rank"] == 2 and "rank" not in rows["gcn"]
    assert rows["gcn"]["scores"]["node.pool"] is None  # over labels it was trained with
    gap = rows["gae"]["difference"]
    assert gap["to"] == "DGI" and gap["mean"] == pytest.approx(-3.9) and gap["p"] < 0.05
    assert rows["dgi"]["difference"]["to"] == "GAE" and gap["stands_out"]
    assert "failed: grace, seed 0: none" in as_text(summary)
