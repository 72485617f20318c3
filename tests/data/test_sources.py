"""Registered sources: the embedded and generated ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cimage_dist.config import DataConfig, SbmConfig
from cimage_dist.data.ingest import SOURCES, open_graph
from cimage_dist.data.sources import generated
from cimage_dist.data.store import Graph


def test_all_promised_names_are_registered() -> None:
    names = (
        "digits forum sbm cora citeseer pubmed photo computers wikics ogbn-arxiv "
        "ogbn-products ogbn-papers100m"
    )
    assert set(SOURCES) == set(names.split())


def test_forum(tmp_path: Path) -> None:
    """The demo's graph: 40 words a post, a topic of its own inside few edges, the same at every
    ingest.
    """
    graph = open_graph(DataConfig(name="forum", normalize="none", store_dir=str(tmp_path / "a")))
    again = open_graph(DataConfig(name="forum", normalize="none", store_dir=str(tmp_path / "b")))
    assert graph.fingerprint == again.fingerprint and (graph.num_nodes, graph.num_features) == (
        2000,
        2000,
    )
    x, topic, topology = graph.features(), graph.labels(), graph.topology()
    assert torch.equal(x.sum(1), torch.full((2000,), 40.0)) and torch.equal(x, x.round())
    rows = torch.repeat_interleave(torch.arange(2000), topology.indptr.diff())
    inside = (topic[rows] == topic[topology.indices.long()]).double().mean()
    assert abs(inside - (0.4 + 0.6 / 6)) < 0.02 and topic.bincount().min() > 250


def test_digits(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    graph = open_graph(DataConfig(name="digits", normalize="source", store_dir=str(tmp_path)))
    pixels, labels = load_digits(return_X_y=True)
    np.testing.assert_allclose(graph.x, pixels / 16)
    np.testing.assert_array_equal(graph.y, labels)
    degrees = np.diff(graph.indptr)
    assert graph.num_nodes == 1797 and graph.num_classes == 10 and degrees.min() >= 10
    assert 1797 * 10 <= graph.num_edges <= 2 * 1797 * 10


def sbm_graph(tmp_path: Path, **options: object) -> Graph:
    return open_graph(
        DataConfig(
            name="sbm", normalize="source", store_dir=str(tmp_path), sbm=SbmConfig(**options)
        )
    )


def test_sbm_has_what_was_planted(tmp_path: Path) -> None:
    graph = sbm_graph(
        tmp_path, num_nodes=6_000, num_blocks=4, avg_degree=12, homophily=0.7, noise=0.5
    )
    assert graph.y is not None
    assert np.bincount(graph.y).tolist() == [1500] * 4
    degrees = np.diff(graph.indptr)
    assert degrees.mean() == pytest.approx(12, rel=0.08)  # a few per cent are merged duplicates
    assert degrees.max() > 5 * degrees.mean()  # power law
    edges = graph.topology().edge_list()
    y = torch.from_numpy(np.array(graph.y))
    inside = float((y[edges.src] == y[edges.dst]).double().mean())
    assert inside == pytest.approx(0.7, abs=0.03)
    planted = graph.manifest["notes"]["planted"]
    low, high = planted["label_columns"]
    x = np.asarray(graph.x, dtype=np.float64)
    between = np.stack([x[graph.y == c].mean(0) for c in range(4)]).std(0)
    assert between[low:high].mean() > 0.5
    assert (
        between[slice(*planted["nuisance_columns"])].max() < 0.15
    )  # 4 · standard error of a class mean
    nuisance = x[:, slice(*planted["nuisance_columns"])]
    factors = planted["nuisance_factors"]
    correlation = np.corrcoef(nuisance.T)
    same = (
        np.subtract.outer(np.arange(nuisance.shape[1]), np.arange(nuisance.shape[1])) % factors == 0
    )
    assert correlation[same].min() > 0.7 and np.abs(correlation[~same]).max() < 0.1
    # ids carry no information: degree and block are unrelated to the id
    assert abs(np.corrcoef(np.arange(6_000), degrees)[0, 1]) < 0.06
    assert abs(np.corrcoef(np.arange(6_000), graph.y)[0, 1]) < 0.06


def test_sbm_is_a_function_of_its_seed(tmp_path: Path) -> None:
    first = sbm_graph(tmp_path / "a", num_nodes=500)
    assert first.fingerprint == sbm_graph(tmp_path / "b", num_nodes=500).fingerprint
    assert first.fingerprint != sbm_graph(tmp_path / "b", num_nodes=500, seed=1).fingerprint


@pytest.mark.parametrize(
    "options",
    [
        {"num_nodes": 2, "num_blocks": 1, "avg_degree": 4},
        {"num_nodes": 50, "num_blocks": 50, "homophily": 0.0},
        {"num_nodes": 40, "degree_exponent": 1.5},
        {"num_nodes": 40, "degree_exponent": 2.0},
        {"num_nodes": 40, "degree_exponent": 50.0},
        {"num_nodes": 40, "label_features": 0},
        {"num_nodes": 40, "nuisance_features": 0, "noise": 0.0},
    ],
)
def test_sbm_corner_cases(tmp_path: Path, options: dict[str, object]) -> None:
    graph = sbm_graph(tmp_path, **options)
    assert graph.num_nodes == options["num_nodes"] and graph.num_edges > 0


def test_sbm_does_not_depend_on_how_much_is_asked_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several chunks: every row and edge is there once."""
    monkeypatch.setattr(generated, "_CHUNK_ROWS", 64)
    monkeypatch.setattr(generated, "_CHUNK_EDGES", 100)
    graph = sbm_graph(tmp_path, num_nodes=500, avg_degree=6)
    assert graph.manifest["statistics"]["edges_read"] == 1_500
    assert len(np.unique(np.asarray(graph.x), axis=0)) == 500
