"""A graph without labels, from files to scores: what is held out is never trained on, and the table
says what its numbers mean.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist import Graph, Pretrainer, evaluate, load_config
from cimage_dist.config import Config
from cimage_dist.data.splits import settled, training_graph
from cimage_dist.eval.controls import choose
from cimage_dist.reporting.training import SCORES, auc_error, next_steps
from tests.cli.conftest import TRAINING, Cli

SMALL = [*TRAINING, "eval.kmeans_restarts=1"]


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    """Four groups of 60 nodes, about 2,600 edges, most of them inside a group; features follow the
    groups."""
    rng = np.random.default_rng(0)
    groups = np.arange(240) % 4
    chance = np.where(groups[:, None] == groups, 0.3, 0.02)
    edges = np.argwhere(np.triu(rng.random((240, 240)) < chance, 1))
    features = np.eye(4)[groups] @ rng.normal(size=(4, 10)) + rng.normal(size=(240, 10))
    return {"edges": edges, "features": features.astype(np.float32)}


@pytest.fixture(scope="module")
def folder(arrays: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "mine"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def settings(folder: Path) -> list[str]:
    place = folder.parent / "stores"
    more = ["loss.factor_weight=0.1", "ci.max_samples=100", "run.dir=run"]
    return ["data.name=mine", f"data.path={folder}", f"data.store_dir={place}", *SMALL, *more]


def test_from_files_to_scores(cli: Cli, folder: Path, tmp_path: Path) -> None:
    given = settings(folder)
    got = cli("pretrain", *given)
    assert got.code == 0
    for said in ("no labels: 2% and 3% of the edges are held out", "clusters: ", "length: 4 steps"):
        assert said in got.err, said
    assert "edges held out" in got.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["holdout_edges"] == "link"
    assert summary["edges_held_out"] > 100
    assert set(summary["chosen"]) == {"width", "layers", "teleport", "clusters"}
    assert summary["chosen"]["clusters"]["by"] == "features and edges"
    assert summary["chosen"]["teleport"]["by"] == "features and edges"
    assert summary["chosen"]["layers"] == {"value": 2, "by": "model.num_layers"}

    got = cli("evaluate", *given)
    assert got.code == 0
    for score in SCORES.values():
        assert f"│ {score.label} " in got.out and f"{score.label}: " in got.out
    assert "next: " in got.out and "labels.csv" in got.out
    scores = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert scores["clusters"] == summary["chosen"]["clusters"]
    assert set(scores["controls"]) == {"raw", "smoothed", "pagerank", "pca", "untrained"}
    for row in (scores, *scores["controls"].values()):
        assert row["node"] is None and 0 <= row["link"]["auc"] <= 100
        assert row["cluster"]["clusters"] == scores["clusters"]["value"]
        assert -0.5 < row["cluster"]["modularity"] < 1 and row["cluster"]["stability"] <= 100
        assert 0 < row["shape"]["rank"] <= row["shape"]["width"]
        assert 0 <= row["shape"]["neighbours"] <= 100
    assert scores["controls"]["smoothed"]["chosen_by"] == "links"
    assert scores["controls_best"]["any"] in scores["controls"]
    assert scores["link"]["auc"] > 60  # groups and features agree

    # All edges from now on: that is another training, and this folder is taken.
    for verb in ("pretrain", "evaluate"):
        got = cli(verb, *given, "data.holdout_edges=none")
        assert got.code == 2 and "data.holdout_edges" in got.err


def test_scores_of_a_file_leave_links_out(cli: Cli, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "z.npy", np.random.default_rng(0).normal(size=(240, 6)).astype(np.float32))
    got = cli("evaluate", *settings(folder), "--embedding", "z.npy", "--json")
    scores = json.loads(got.out)
    assert scores["link"] is None and "may have seen" in scores["link_reason"]
    assert scores["shape"]["rank"] > 4 and scores["cluster"]["stability"] is not None


def test_the_same_from_python(arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    graph = Graph.from_edges(arrays["edges"].T, arrays["features"])
    cfg = load_config(overrides=SMALL)
    model = Pretrainer(cfg).fit(graph)
    z = model.embed(graph)
    scores = evaluate(z, graph, cfg)
    assert scores["node"] is None and scores["link"]["auc"] > 60 and "honest" in scores["link_note"]
    assert scores["shape"]["width"] == 12 and "stability" in scores["cluster"]
    assert evaluate(z, graph, cfg, tasks=["cluster"])["link"] is None
    again = Pretrainer.load(model.save(tmp_path / "model"))
    torch.testing.assert_close(again.embed(graph), z, rtol=0, atol=0)
    # Of another graph nothing is held out: embedded with every edge.
    doubled = np.concatenate([arrays["edges"], arrays["edges"] + 240]).T
    other = Graph.from_edges(doubled, np.concatenate([arrays["features"]] * 2))
    whole = replace(cfg, data=replace(cfg.data, holdout_edges="none"))
    model.cfg, found = whole, model.embed(other)
    torch.testing.assert_close(again.embed(other), found, rtol=0, atol=0)


def test_held_out_edges_are_in_no_direction_of_the_training_graph(arrays) -> None:
    graph = Graph.from_edges(arrays["edges"].T, arrays["features"])
    data = Config().data
    topology, links = training_graph(graph, data, 0)
    again, same = training_graph(graph, settled(data, graph), 0)
    assert links is not None and same is not None and torch.equal(links.test_pos, same.test_pos)
    kept = set(zip(topology.rows().tolist(), topology.indices.tolist(), strict=True))
    for u, v in torch.cat([links.val_pos, links.test_pos]).tolist():
        assert (u, v) not in kept and (v, u) not in kept
    share = 1 - topology.num_edges / graph.num_edges
    assert share == pytest.approx(0.05, abs=0.002) and again.num_edges == topology.num_edges


def test_when_edges_are_held_out() -> None:
    data = Config().data
    assert data.settled(True, 10**6).holdout_edges == "none"
    assert data.settled(False, 100).holdout_edges == "none"  # no score from two edges
    assert data.settled(False, 10**9).holdout_edges == "none"  # no copy of a billion
    found = data.settled(False, 10**6)
    assert (found.holdout_edges, found.link_val_ratio, found.link_test_ratio) == (
        "link",
        0.02,
        0.03,
    )
    own = load_config(overrides=["data.link_test_ratio=0.2"]).data.settled(False, 10**6)
    assert (own.link_val_ratio, own.link_test_ratio) == (0.05, 0.2)
    asked = load_config(overrides=["data.holdout_edges=link"]).data
    assert asked.settled(False, 10**6) == asked


def test_controls_are_chosen_on_validation_edges_and_not_on_test_edges(arrays) -> None:
    graph = Graph.from_edges(arrays["edges"].T, arrays["features"])
    topology, links = training_graph(graph, Config().data, 0)
    assert links is not None
    choice = choose(graph.features(), topology, None, None, links)
    assert choice.by == "links" and choice.best != "raw"
    assert choice.scores[choice.best] > choice.scores["raw"]
    swapped = replace(links, test_pos=links.test_neg, test_neg=links.test_pos)
    assert choose(graph.features(), topology, None, None, swapped) == choice
    assert choose(graph.features(), topology, None, None).by == "fixed"


@pytest.mark.parametrize(
    ("ours", "words"),
    [(95.0, "training has paid"), (80.5, "within the noise"), (60.0, "BELOW smoothed")],
)
def test_what_to_do_next_follows_from_the_numbers(ours: float, words: str) -> None:
    result = {
        "link": {"val_auc": ours, "val_edges": 2000},
        "controls": {"smoothed": {"link": {"val_auc": 80.0}}},
        "controls_best": {"any": "smoothed"},
        "cluster": {"stability": 90.0, "modularity": 0.5},
        "shape": {"rank": 100.0, "width": 512},
    }
    said = next_steps(result)
    assert words in said[0] and len(said) == 2
    poor = {"cluster": {"stability": 20.0, "modularity": 0.0}, "shape": {"rank": 2, "width": 512}}
    assert len(next_steps(result | poor)) == 5


def test_the_error_of_an_auc() -> None:
    """Against the spread over many draws."""
    rng = np.random.default_rng(0)
    pos, neg = rng.normal(1.0, 1.0, (400, 100)), rng.normal(0.0, 1.0, (400, 100))
    found = 100 * (pos[:, :, None] > neg[:, None, :]).mean((1, 2))
    assert auc_error(float(found.mean()), 100) == pytest.approx(found.std(), rel=0.1)
