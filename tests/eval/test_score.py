"""All scores of an embedding together, the clustering score and the smoothing control."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from cimage_dist.config import EvalConfig
from cimage_dist.errors import UserError
from cimage_dist.eval.controls import smooth_features
from cimage_dist.eval.score import score_clustering, score_embedding
from cimage_dist.types import NodeSplit, Topology

NUM_NODES = 120


def cliques(num_nodes: int = NUM_NODES, num_classes: int = 3) -> tuple[Topology, Tensor]:
    """One clique per class, and the class of every node."""
    y = torch.arange(num_nodes) % num_classes
    adjacency = (y[:, None] == y) & ~torch.eye(num_nodes, dtype=torch.bool)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), adjacency.sum(1).cumsum(0)])
    return Topology(indptr, adjacency.nonzero()[:, 1].to(torch.int32)), y


def embedding(y: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(y.clamp(min=0), 5).float() + 1e-4 * torch.randn(
        y.numel(), 5, generator=torch.Generator().manual_seed(0)
    )


def thirds(num_nodes: int = NUM_NODES) -> NodeSplit:
    third = torch.arange(num_nodes) // 3 % 3
    return NodeSplit(third == 0, third == 1, third == 2)


def test_all_scores_of_a_good_embedding() -> None:
    topology, y = cliques()
    cfg = EvalConfig(few_labels=[2, 5], few_label_splits=3)
    scores = score_embedding(embedding(y), y, thirds(), topology, cfg, seed=0)
    assert {name: scores["node"][name] for name in ("val", "test", "pool", "pool_se")} == {
        "val": 100.0,
        "test": 100.0,
        "pool": 100.0,
        "pool_se": 0.0,
    }
    assert {name: scores["cluster"][name] for name in ("acc", "ari", "f1")} == {
        "acc": 100.0,
        "ari": 100.0,
        "f1": 100.0,
    }
    assert scores["cluster"]["nmi"] == pytest.approx(100.0)
    assert scores["cluster"]["modularity"] == pytest.approx(1 - 1 / 3)
    assert list(scores["few_labels"]) == ["2", "5"]
    for entry in scores["few_labels"].values():
        assert len(entry["scores"]) == 3 and entry["mean"] == pytest.approx(
            sum(entry["scores"]) / 3
        )
    assert json.loads(json.dumps(scores)) == scores


def test_few_label_std_is_the_population_one() -> None:
    topology, y = cliques()
    z = torch.randn(NUM_NODES, 5, generator=torch.Generator().manual_seed(3)) + 0.7 * embedding(y)
    entry = score_embedding(
        z, y, thirds(), topology, EvalConfig(few_labels=[2]), seed=0, tasks=["node"]
    )["few_labels"]["2"]
    assert (
        entry["std"]
        == pytest.approx(
            float(torch.tensor(entry["scores"], dtype=torch.float64).std(correction=0))
        )
        and entry["std"] > 0
    )


def test_few_label_splits_of_the_graph_layer_are_the_default() -> None:
    topology, y = cliques()
    scores = score_embedding(
        embedding(y),
        y,
        thirds(),
        topology,
        EvalConfig(few_labels=[2], few_label_splits=2),
        seed=0,
        tasks=["node"],
    )
    assert len(scores["few_labels"]["2"]["scores"]) == 2 and "cluster" not in scores


def test_an_impossible_few_label_split_does_not_cost_the_other_scores() -> None:
    topology, y = cliques()
    scores = score_embedding(
        embedding(y),
        y,
        thirds(),
        topology,
        EvalConfig(few_labels=[2, 50], few_label_splits=2),
        seed=0,
    )
    refused = scores["few_labels"]["50"]
    assert (refused["mean"], refused["std"], refused["scores"]) == (None, None, [])
    assert "40" in refused["reason"]
    assert scores["few_labels"]["2"]["mean"] is not None and scores["node"] is not None


def test_missing_labels_or_split_give_a_reason() -> None:
    topology, y = cliques()
    z = embedding(y)
    for labels in (None, torch.full_like(y, -1)):
        scores = score_embedding(z, labels, thirds(), topology, EvalConfig(few_labels=[2]), seed=0)
        assert scores["node"] is None and "no labels" in scores["node_reason"]
        assert scores["cluster"] is None and "number of clusters" in scores["cluster_reason"]
        assert "few_labels" not in scores
    assert set(
        score_embedding(z, None, None, topology, EvalConfig(), seed=0, num_clusters=3)["cluster"]
    ) == {"modularity", "stability", "clusters"}
    assert "no split" in score_embedding(z, y, None, topology, EvalConfig(), seed=0)["node_reason"]
    unlabelled_training = torch.where(thirds().train, -1, y)
    assert (
        "no training node"
        in score_embedding(z, unlabelled_training, thirds(), topology, EvalConfig(), seed=0)[
            "node_reason"
        ]
    )


def test_clustering_counts_only_known_labels_and_ignores_row_length() -> None:
    topology, y = cliques()
    z = embedding(y) * torch.logspace(-2, 2, NUM_NODES)[:, None]
    y[::4] = -1
    scores = score_clustering(z, y, 3, topology, seed=0, restarts=3)
    assert scores["acc"] == 100.0 and scores["modularity"] == pytest.approx(2 / 3)


def test_bad_input_is_explained() -> None:
    topology, y = cliques()
    z = embedding(y)
    with pytest.raises(UserError, match=r"shape \[119, 5\] for a graph of 120 nodes"):
        score_embedding(z[1:], y, thirds(), topology, EvalConfig(), seed=0)
    z[3, 1] = float("nan")
    with pytest.raises(UserError, match="1 of 120 embedding rows hold NaN"):
        score_embedding(z, y, thirds(), topology, EvalConfig(), seed=0)
    with pytest.raises(UserError, match="unknown tasks"):
        score_embedding(z, y, thirds(), topology, EvalConfig(), seed=0, tasks=["link"])


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_smoothing_equals_the_dense_product(index_type: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    upper = torch.rand(30, 30, generator=generator).lt(0.1).triu(1)
    upper[5], upper[:, 5] = False, False  # an isolated node
    adjacency = upper | upper.T
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), adjacency.sum(1).cumsum(0)])
    topology = Topology(indptr, adjacency.nonzero()[:, 1].to(index_type))
    x = torch.randn(30, 70, generator=generator)  # wider than one block of columns
    with_loops = adjacency.double() + torch.eye(30)
    scale = with_loops.sum(1).rsqrt()
    step = scale[:, None] * with_loops * scale
    expected = (torch.linalg.matrix_power(step, 3) @ x.double()).float()
    torch.testing.assert_close(smooth_features(x, topology, hops=3), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        smooth_features(x.half(), topology, hops=3), expected, atol=5e-3, rtol=1e-2
    )
    assert torch.equal(smooth_features(x, topology)[5], x[5])
    assert torch.equal(smooth_features(x, topology, hops=0), x)


def test_smoothing_on_a_graph_without_edges_changes_nothing() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        smooth_features(
            x, Topology(torch.zeros(5, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
        ),
        x,
    )
