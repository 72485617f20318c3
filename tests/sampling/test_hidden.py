from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cimage_dist.config import MaskConfig
from cimage_dist.sampling.hidden import (
    PathMasker,
    edge_keys,
    is_edge,
    reverse_entries,
    walk_edges,
    walk_starts,
)
from tests.graphs import random_topology, star, topology_from_pairs


def keys_of(src: torch.Tensor, dst: torch.Tensor, n: int) -> set[int]:
    return set((src * n + dst).tolist())


def test_reverse_entries_swap_rows_and_columns():
    topology = random_topology(30, 80)
    reverse = reverse_entries(topology, edge_keys(topology))
    assert torch.equal(topology.indices[reverse], topology.rows())
    assert torch.equal(reverse[reverse], torch.arange(topology.num_edges))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 40),
    pairs=st.integers(1, 120),
    start=st.sampled_from(["node", "edge"]),
    symmetric=st.booleans(),
    epoch=st.integers(0, 5),
    seed=st.integers(0, 9),
)
def test_masked_and_remaining_make_up_the_graph(n, pairs, start, symmetric, epoch, seed):
    topology = random_topology(n, pairs, seed)
    masker = PathMasker(topology, MaskConfig(start=start, symmetric=symmetric), seed)
    visible, masked = masker.mask(epoch)
    everything = set(edge_keys(topology).tolist())
    seen, hidden = keys_of(visible.src, visible.dst, n), keys_of(masked[:, 0], masked[:, 1], n)
    hidden_both = hidden | keys_of(masked[:, 1], masked[:, 0], n)
    assert hidden <= everything and seen <= everything
    assert seen | hidden_both == everything
    assert {(k % n) * n + k // n for k in seen} == seen, "the visible graph is symmetric"
    assert bool((visible.dst.diff() >= 0).all()), "messages are sorted by destination"
    if symmetric:
        assert not seen & hidden_both
    else:
        # Visible are exactly the edges of which one direction survived.
        assert all((k in hidden) and ((k % n) * n + k // n in hidden) for k in everything - seen)


def test_node_starts_mask_at_most_three_edges_each():
    topology = random_topology(200, 2000)
    config = MaskConfig(start_rate=0.7, symmetric=False)
    masked = PathMasker(topology, config, 0).mask(0).masked
    assert masked.shape[0] <= 2.1 * 200
    starts, _ = walk_starts(topology, config, 0, 0)
    assert starts.numel() == 140 and starts.unique().numel() == 140


def test_every_walk_step_follows_an_edge_of_the_node_it_stands_on():
    """From one leaf of a star every walk goes leaf, hub, leaf, hub: entries alternate between the
    two kinds of rows.
    """
    topology = star(5)
    walked = walk_edges(topology, torch.tensor([3]), torch.tensor([3]), 2, seed=0, epoch=0)
    rows = topology.rows()[walked].tolist()
    assert sorted(rows) == [0, 3]


def test_walks_stop_at_isolated_nodes():
    topology = topology_from_pairs([(0, 1)], 4)
    walked = walk_edges(topology, torch.tensor([2, 3]), torch.tensor([2, 3]), 3, seed=0, epoch=0)
    assert walked.numel() == 0


def test_masks_are_a_function_of_seed_and_epoch():
    topology = random_topology(50, 150)
    a, b = PathMasker(topology, MaskConfig(), 1), PathMasker(topology, MaskConfig(), 1)
    a.mask(7)
    assert torch.equal(a.mask(2).masked, b.mask(2).masked)
    assert not torch.equal(a.mask(2).masked, a.mask(3).masked)
    assert not torch.equal(a.mask(2).masked, PathMasker(topology, MaskConfig(), 2).mask(2).masked)


def test_walk_choices_are_uniform():
    """4,000 first steps from the hub of an 8-leaf star: chi-square with 7 degrees of freedom below
    24.3 (p = 0.001).
    """
    topology = star(8)
    counts = torch.zeros(8)
    for epoch in range(4000):
        counts[
            topology.indices[
                walk_edges(topology, torch.tensor([0]), torch.tensor([0]), 1, 0, epoch)
            ]
            - 1
        ] += 1
    assert float(((counts - 500) ** 2 / 500).sum()) < 24.3


def test_negatives_are_neither_edges_nor_loops():
    topology = random_topology(30, 200)
    masker = PathMasker(topology, MaskConfig(), 0)
    pairs = masker.negatives(500, step=3)
    assert pairs.shape == (500, 2)
    assert not is_edge(masker.keys, 30, pairs).any()
    assert not (pairs[:, 0] == pairs[:, 1]).any()


def test_negatives_are_keyed_by_position():
    masker = PathMasker(random_topology(100, 50), MaskConfig(), 0)
    whole = masker.negatives(64, step=3)
    torch.testing.assert_close(
        torch.cat([masker.negatives(20, 3), masker.negatives(44, 3, offset=20)]), whole
    )
    assert not torch.equal(whole, masker.negatives(64, step=4))


def test_a_complete_graph_has_no_negatives():
    n = 5
    topology = topology_from_pairs([(i, j) for i in range(n) for j in range(i)], n)
    assert PathMasker(topology, MaskConfig(), 0).negatives(10, 0).shape == (0, 2)


@pytest.mark.parametrize("rate", [0.1, 0.7, 1.0])
def test_edge_starts_keep_about_the_asked_share(rate):
    topology = random_topology(300, 5000)
    starts, walker = walk_starts(topology, MaskConfig(start="edge", start_rate=rate), 0, 0)
    assert torch.equal(topology.rows()[walker], starts)
    share = starts.numel() / topology.num_edges
    assert (
        abs(share - rate) < 4 * (rate * (1 - rate) / topology.num_edges) ** 0.5 + 1e-9
    )  # four standard errors
