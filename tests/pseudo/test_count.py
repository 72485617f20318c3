"""The number of clusters, estimated without labels."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cimage_dist.pseudo.propagated import MOST, PropagatedSettings, candidates, estimate_clusters
from tests.graphs import planted_blocks


@pytest.mark.parametrize("blocks", [2, 3, 6, 11])
def test_planted_blocks_are_counted(blocks):
    x, topology, _ = planted_blocks(num_nodes=1200, num_blocks=blocks, seed=blocks)
    assert estimate_clusters(x, topology, PropagatedSettings(), seed=0) == blocks


def test_the_answer_does_not_hang_on_the_seed():
    x, topology, _ = planted_blocks(num_nodes=900, num_blocks=5, seed=3)
    assert {estimate_clusters(x, topology, PropagatedSettings(), seed) for seed in range(3)} == {5}


def test_candidates_rise_and_stay_within_bounds():
    found = candidates(10**9)
    assert found[:11] == list(range(2, 13)) and found[-1] <= MOST
    assert all(b > a for a, b in pairwise(found))
    assert candidates(5) == [2] and max(candidates(100)) == 10


def test_few_nodes_are_no_trouble():
    x, topology, _ = planted_blocks(num_nodes=12, num_blocks=2, seed=0)
    assert estimate_clusters(x, topology, PropagatedSettings(), seed=0) == 2
    assert isinstance(x, torch.Tensor)
