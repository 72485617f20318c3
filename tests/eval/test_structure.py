"""Scores without labels: each is high where it should be, low where it should be, and never
depends on labels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cimage_dist.eval import score
from cimage_dist.eval.score import cluster_stability, effective_rank, neighbour_agreement
from cimage_dist.types import Topology


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def cliques(sizes: list[int]) -> tuple[Topology, Tensor]:
    """Complete graphs side by side, and the one of every node."""
    y = torch.repeat_interleave(torch.tensor(sizes))
    adjacency = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), adjacency.sum(1).cumsum(0)])
    return Topology(indptr, adjacency.nonzero()[:, 1].to(torch.int32)), y


def test_the_effective_rank_counts_directions() -> None:
    even = torch.cat([torch.eye(8), -torch.eye(8)]).repeat(20, 1)
    assert effective_rank(even) == pytest.approx(8.0)
    assert effective_rank(torch.cat([even, torch.zeros(320, 5)], 1)) == pytest.approx(8.0)
    line = torch.cat([noise(300, 1).sign(), torch.zeros(300, 7)], 1)
    assert effective_rank(line) == pytest.approx(1.0)
    assert effective_rank(torch.ones(50, 4)) == 0.0
    assert effective_rank(even[:4]) == pytest.approx(3.0)  # four rows less their mean


def test_the_effective_rank_is_that_of_a_sample_where_there_are_many_nodes(monkeypatch) -> None:
    z = noise(3000, 6)
    whole = effective_rank(z)
    monkeypatch.setattr(score, "_RANK_ROWS", 500)
    assert effective_rank(z) == pytest.approx(whole, rel=0.05) and effective_rank(z) != whole


def test_clusters_that_are_there_are_found_from_either_half() -> None:
    y = torch.arange(600) % 4
    z = torch.nn.functional.one_hot(y, 8).float() + 0.05 * noise(600, 8)
    found = cluster_stability(z, 4, seed=0, restarts=5)
    assert found == pytest.approx(100.0)
    drawn = cluster_stability(noise(600, 8), 4, seed=0, restarts=5)
    assert drawn is not None and drawn < 60
    assert cluster_stability(z[:12], 4, seed=0, restarts=1) is None


def test_nearest_rows_that_are_neighbours() -> None:
    topology, y = cliques([5, 20, 40])
    z = torch.nn.functional.one_hot(y, 3).float() + 1e-3 * noise(65, 3)
    assert neighbour_agreement(z, topology) == pytest.approx(100.0)
    drawn = neighbour_agreement(noise(65, 3), topology)
    assert drawn is not None and 20 < drawn < 80
    alone = Topology(torch.zeros(5, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
    assert neighbour_agreement(noise(4, 3), alone) is None


def test_only_as_many_rows_count_as_there_are_neighbours() -> None:
    pair = Topology(torch.tensor([0, 1, 2, 2, 2]), torch.tensor([1, 0], dtype=torch.int32))
    z = torch.tensor([[1.0, 0.0], [0.99, 0.01], [0.0, 1.0], [-1.0, 0.0]])
    assert neighbour_agreement(z, pair) == 100.0
