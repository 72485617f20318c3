"""Controls: propagation against dense products, and choices that only training and validation
labels make.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cimage_dist.eval import controls
from cimage_dist.eval.controls import (
    ALPHAS,
    HOPS,
    choose,
    hop_weights,
    pagerank_features,
    pagerank_weights,
    principal_components,
    propagate,
)
from cimage_dist.pipeline.evaluation import best_controls
from cimage_dist.types import NodeSplit, Topology

NUM_NODES = 240


def blocks(inside: float, between: float) -> tuple[Topology, Tensor]:
    """A random graph of three classes, and the class of every node."""
    y = torch.arange(NUM_NODES) % 3
    chance = torch.where(y[:, None] == y, inside, between)
    upper = (
        torch.rand(NUM_NODES, NUM_NODES, generator=torch.Generator().manual_seed(0))
        .lt(chance)
        .triu(1)
    )
    adjacency = upper | upper.T
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), adjacency.sum(1).cumsum(0)])
    return Topology(indptr, adjacency.nonzero()[:, 1].to(torch.int32)), y


def step_matrix(topology: Topology) -> Tensor:
    dense = torch.eye(topology.num_nodes, dtype=torch.float64)
    dense[topology.rows(), topology.indices.long()] = 1.0
    scale = dense.sum(1).rsqrt()
    return scale[:, None] * dense * scale


def features(y: Tensor, noise: float) -> Tensor:
    return torch.nn.functional.one_hot(y, 6).float() + noise * torch.randn(
        NUM_NODES, 6, generator=torch.Generator().manual_seed(1)
    )


def split() -> NodeSplit:
    ids = torch.arange(NUM_NODES)
    return NodeSplit(ids < 30, (ids >= 30) & (ids < 120), ids >= 120)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_pagerank_is_its_iteration(alpha: float) -> None:
    topology, y = blocks(0.2, 0.02)
    x, step = features(y, 1.0), step_matrix(topology)
    h = x.double()
    for _ in range(10):
        h = (1 - alpha) * step @ h + alpha * x.double()
    torch.testing.assert_close(
        pagerank_features(x, topology, alpha), h.float(), atol=1e-5, rtol=1e-4
    )
    assert sum(pagerank_weights(alpha)) == pytest.approx(1.0)


def test_many_combinations_share_the_powers_and_some_rows_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controls, "_COLUMNS", 4)
    topology, y = blocks(0.2, 0.02)
    x, step = features(y, 1.0), step_matrix(topology)
    nodes = torch.tensor([3, 200, 7])
    found = propagate(x, topology, [hop_weights(3), hop_weights(0), [0.5, 0.0, 2.0]], nodes)
    expected = [
        torch.linalg.matrix_power(step, 3) @ x.double(),
        x.double(),
        0.5 * x + 2 * step @ step @ x.double(),
    ]
    torch.testing.assert_close(found, torch.stack(expected)[:, nodes].float(), atol=1e-5, rtol=1e-4)


def test_smoothing_is_chosen_where_neighbours_agree_and_raw_where_they_do_not() -> None:
    topology, y = blocks(0.3, 0.01)
    choice = choose(features(y, 1.0), topology, y, split())
    assert choice.best != "raw" and choice.scores[choice.best] > choice.scores["raw"] + 5
    assert choice.hops in HOPS and choice.alpha in ALPHAS
    topology, _ = blocks(0.2, 0.2)
    choice = choose(features(y, 0.5), topology, y, split())
    assert choice.best != "smoothed" and choice.scores["smoothed"] < choice.scores["raw"] - 10


def test_test_labels_do_not_choose() -> None:
    topology, y = blocks(0.2, 0.05)
    x, poisoned = features(y, 1.0), y.clone()
    poisoned[split().test] = 7
    assert choose(x, topology, y, split()) == choose(x, topology, poisoned, split())


def test_without_labels_the_choice_is_fixed() -> None:
    topology, y = blocks(0.2, 0.05)
    for labels, parts in ((None, split()), (y, None), (torch.full_like(y, -1), split())):
        choice = choose(features(y, 1.0), topology, labels, parts)
        assert (choice.hops, choice.alpha, choice.scores, choice.best) == (2, 0.2, {}, "pagerank")


def test_a_keyed_part_of_the_pool_chooses_where_rows_are_too_wide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controls, "_MOST_CANDIDATES", 1)
    topology, y = blocks(0.3, 0.01)
    assert choose(features(y, 1.0), topology, y, split()).best != "raw"


@pytest.mark.parametrize("most_exact", [0, 2048], ids=["randomised", "exact"])
def test_principal_components_keep_the_largest_directions(
    most_exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "_MOST_EXACT_PCA", most_exact)
    x = torch.randn(100, 20, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -3, 20)
    rows = torch.nn.functional.normalize(x, dim=1)
    values = torch.linalg.svdvals(rows - rows.mean(0))
    found = principal_components(x, 5)
    assert found.shape == (100, 5) and found.dtype == torch.float32
    torch.testing.assert_close(found.norm(dim=0), values[:5], rtol=1e-3, atol=1e-4)
    assert torch.equal(found, principal_components(x, 5))
    assert principal_components(x, 512).shape == (100, 20)


def test_the_best_control_is_by_the_pool_and_by_width() -> None:
    rows = {
        "raw": {"width": 100, "node": {"pool": 60.0, "test": 99.0}},
        "pagerank": {"width": 100, "node": {"pool": 80.0, "test": 1.0}},
        "pca": {"width": 16, "node": {"pool": 79.0, "test": 2.0}},
        "untrained": {"width": 16, "node": {"pool": 70.0, "test": 90.0}},
    }
    assert best_controls(rows, 16) == {"any": "pagerank", "same_width": "pca"}
    assert best_controls(rows, 100) == {"any": "pagerank", "same_width": "pagerank"}
    assert best_controls({"raw": {"width": 4, "node": None}}, 16) == {
        "any": None,
        "same_width": None,
    }
