"""R-DGAE: its losses against dense formulas, its two operators on hand-made cases, and the whole on
a planted graph.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.nn.projection import compact
from cimage_dist.pseudo import contingency, matched_accuracy, rdgae_loss
from cimage_dist.pseudo.rdgae import (
    Encoder,
    RDGAESettings,
    rdgae_labels,
    restored_counts,
    settings_for,
)
from cimage_dist.pseudo.rdgae_loss import TargetGraph, TrustedNodes
from cimage_dist.types import SparseRows, Topology
from tests.graphs import random_topology, topology_from_pairs

CPU = torch.device("cpu")
QUICK = RDGAESettings(0.6, 0.3, pretrain_epochs=40, cluster_epochs=40, restarts=3, members=1)


def embedding(num_nodes: int, width: int = 4, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (
        scale
        * torch.randn(
            num_nodes, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
    ).requires_grad_()


def one_way_target(num_nodes: int = 53) -> TargetGraph:
    """A target with a pair that has no mirror image, as corrections make them."""
    target = TargetGraph.of(random_topology(num_nodes, 90), CPU)
    extra = torch.tensor([3 * num_nodes + 40, 3 * num_nodes + 41])
    return TargetGraph(torch.cat([target.keys, extra]).unique(), num_nodes)


def dense_target(target: TargetGraph) -> torch.Tensor:
    dense = torch.zeros(target.num_nodes, target.num_nodes, dtype=torch.float64)
    dense[target.pairs(0, target.num_pairs)] = 1
    return dense


def dense_reconstruction(z: torch.Tensor, target: TargetGraph) -> torch.Tensor:
    dense = dense_target(target)
    num_edges = dense.sum() - target.num_nodes
    weight = (target.num_nodes**2 - num_edges) / num_edges
    return F.binary_cross_entropy_with_logits(z @ z.t(), dense, pos_weight=weight)


@pytest.mark.parametrize("scale", [0.3, 3.0])  # the second has logits from -60 to 120
@pytest.mark.parametrize("tile", [8, 53, 512])
def test_the_reconstruction_loss_is_the_dense_one_with_its_gradient(scale, tile, monkeypatch):
    monkeypatch.setattr(rdgae_loss, "_TILE", tile)
    monkeypatch.setattr(rdgae_loss, "_PAIRS_PER_CHUNK", 17)
    target, z = one_way_target(), embedding(53, scale=scale)
    dense, tiled = (
        dense_reconstruction(z, target),
        rdgae_loss.reconstruction_loss(z, target, Comm()),
    )
    torch.testing.assert_close(tiled, dense, rtol=1e-12, atol=0)
    want, found = (torch.autograd.grad(3 * loss, z)[0] for loss in (dense, tiled))
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-14)


def test_very_unlike_nodes_stay_finite_in_single_precision():
    z = torch.tensor([[40.0, 0.0], [-40.0, 0.0]], requires_grad=True)
    loss = rdgae_loss.reconstruction_loss(
        z, TargetGraph.of(topology_from_pairs([(0, 1)], 2), CPU), Comm()
    )
    assert loss.item() == pytest.approx(800)  # 1/4 of two missed edges at 1600 each
    assert bool(torch.autograd.grad(loss, z)[0].isfinite().all())


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out


def test_no_tensor_is_as_large_as_a_block_of_rows(monkeypatch):
    monkeypatch.setattr(rdgae_loss, "_TILE", 8)
    num_nodes = 200
    target, z = TargetGraph.of(random_topology(num_nodes, 50), CPU), embedding(num_nodes)
    with _Largest() as largest:
        rdgae_loss.reconstruction_loss(z, target, Comm()).backward()
    assert num_nodes * 4 <= largest.numel < num_nodes * 8


def test_the_sampled_loss_estimates_the_exact_one():
    target, z = one_way_target(), embedding(53)
    num_samples = 200_000
    exact = rdgae_loss.reconstruction_loss(z, target, Comm())
    spread = float(F.softplus(z @ z.t()).std()) / math.sqrt(num_samples)
    found = rdgae_loss.sampled_reconstruction_loss(z, target, num_samples, 7, Comm())
    assert 0 < abs(float(found - exact)) < 5 * spread
    again = rdgae_loss.sampled_reconstruction_loss(z, target, num_samples, 7, Comm())
    assert float(again) == float(found)
    want, got = (torch.autograd.grad(loss, z)[0] for loss in (exact, found))
    assert float(F.cosine_similarity(want.flatten(), got.flatten(), dim=0)) > 0.999


def test_the_clustering_loss_is_the_divergence_summed_over_trusted_nodes():
    z, centres = embedding(30), embedding(3, seed=1)
    labels, omega = torch.arange(30) % 3, torch.arange(30) % 2 == 0
    squared = (z[:, None] - centres).square().sum(2)
    q = (1 / (1 + squared)) / (1 / (1 + squared)).sum(1, keepdim=True)
    p = F.one_hot(labels, 3).double()
    dense = F.kl_div(q[omega].log(), p[omega], reduction="sum")
    found = rdgae_loss.clustering_loss(z, centres, labels, omega, Comm())
    torch.testing.assert_close(found, dense, rtol=1e-12, atol=0)
    for want, got in zip(
        *(torch.autograd.grad(loss, (z, centres)) for loss in (dense, found)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


def test_the_encoder_is_the_normalised_graph_convolution():
    topology = random_topology(20, 40)
    x = torch.rand(20, 6, dtype=torch.float64)
    encoder = Encoder(6, 5, 3).double()
    a_hat = torch.eye(20, dtype=torch.float64)
    a_hat[topology.rows(), topology.indices] = 1
    scale = a_hat.sum(1).rsqrt()
    a_hat = scale[:, None] * a_hat * scale
    want = a_hat @ (a_hat @ x @ encoder.w0).relu() @ encoder.w1
    torch.testing.assert_close(encoder(x, topology.edge_list()), want, rtol=1e-12, atol=1e-14)


def edges_of(target: TargetGraph) -> set[tuple[int, int]]:
    first, second = target.pairs(0, target.num_pairs)
    return {(i, j) for i, j in zip(first.tolist(), second.tolist(), strict=True) if i != j}


def test_the_correction_ties_trusted_nodes_to_hubs_and_cuts_between_clusters():
    """Nodes 0-2 are of cluster 0 with hub 1, nodes 3-5 of cluster 1 with hub 5; node 2, nearest
    centre 0, and node 3 are not trusted.
    """
    target = TargetGraph.of(topology_from_pairs([(0, 4), (0, 3), (2, 5), (4, 5), (0, 2)], 6), CPU)
    squared = torch.tensor([[2.0, 9.0], [1.0, 9.0], [0.5, 9.0], [9.0, 1.0], [9.0, 3.0], [9.0, 2.0]])
    omega = torch.tensor([True, True, False, False, True, True])
    corrected = target.corrected(squared, omega)
    want = {(0, 3), (2, 5), (4, 5), (0, 2)}
    want |= {(j, i) for i, j in want}
    want |= {(0, 1)}  # 0 is tied to hub 1; 4 to hub 5 already; a hub to itself already
    assert edges_of(corrected) == want
    assert corrected.num_pairs == len(want) + 6
    assert corrected.positive_weight == (36 - len(want)) / len(want)
    assert edges_of(corrected.corrected(squared, omega)) == want  # nothing left to do
    assert edges_of(target.corrected(squared, torch.zeros(6, dtype=torch.bool))) == edges_of(target)


def test_trusted_nodes_only_grow_and_thresholds_shrink_when_they_do_not():
    q = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.4, 0.3, 0.3], [0.34, 0.33, 0.33]])
    trusted = TrustedNodes(torch.zeros(4, dtype=torch.bool), beta1=0.45, beta2=0.2)
    trusted.after_epoch(q)
    assert trusted.omega.tolist() == [
        True,
        False,
        False,
        False,
    ]  # node 1: the best is not clear of the second
    trusted.after_epoch(q.flip(0))
    assert trusted.omega.tolist() == [True, False, False, False]  # as many nodes, but no more
    for _ in range(13):
        trusted.after_epoch(None)
    assert (trusted.beta1, trusted.beta2) == (0.45, 0.2)
    trusted.after_epoch(None)
    assert (trusted.beta1, trusted.beta2) == (0.45 * 0.95, 0.2 * 0.85)
    trusted.beta1, trusted.beta2 = 0.45, 0.05
    trusted.after_epoch(q)
    assert trusted.omega.tolist() == [True, True, False, False]


def planted(num_nodes: int = 240, blocks: int = 3) -> tuple[torch.Tensor, Topology, torch.Tensor]:
    """Blocks in both structure (ten edges per node, one in ten across) and words."""
    generator = torch.Generator().manual_seed(0)
    true = torch.arange(num_nodes) % blocks
    first = torch.randint(0, num_nodes, (num_nodes * 5,), generator=generator)
    inside = (
        torch.randint(0, num_nodes // blocks, first.shape, generator=generator) * blocks
        + true[first]
    )
    across = torch.randint(0, num_nodes, first.shape, generator=generator)
    second = torch.where(torch.rand(first.shape, generator=generator) < 0.9, inside, across)
    chance = torch.full((num_nodes, 60), 0.03).masked_fill(
        torch.arange(60) % blocks == true[:, None], 0.1
    )
    x = torch.bernoulli(chance, generator=generator).double()
    return x, topology_from_pairs(torch.stack([first, second], 1).numpy(), num_nodes), true


def test_planted_clusters_are_found_and_the_seed_decides_everything():
    x, topology, true = planted()
    ticks: list[tuple[int, int, str]] = []
    torch.manual_seed(3)
    labels, confidence = rdgae_labels(
        compact(x),
        topology,
        3,
        QUICK,
        0,
        tick=lambda step, total, values, stage: ticks.append((step, total, stage)),
    )
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)  # the caller's randomness is left alone
    assert labels.dtype == torch.int64 and confidence.dtype == torch.float64
    assert float(confidence.min()) >= 0 and float(confidence.max()) <= 1
    right = matched_accuracy(contingency(labels, true, 3, 3))
    assert right > 0.95
    surest = confidence.topk(60).indices
    assert matched_accuracy(contingency(labels[surest], true[surest], 3, 3)) >= right
    assert (
        ticks[0] == (1, 40, "R-DGAE pre-training")
        and ticks[-1] == (40, 40, "R-DGAE clustering")
        and len(ticks) == 80
    )
    again = rdgae_labels(compact(x), topology, 3, QUICK, 0)
    assert torch.equal(again[0], labels) and torch.equal(again[1], confidence)
    other = rdgae_labels(compact(x), topology, 3, QUICK, 1)[1]
    assert not torch.equal(other, confidence)


def test_dense_and_sparse_features_agree():
    x, topology, _ = planted()
    assert isinstance(compact(x), SparseRows)
    dense, sparse = (rdgae_labels(rows, topology, 3, QUICK, 0) for rows in (x, compact(x)))
    assert torch.equal(dense[0], sparse[0])
    torch.testing.assert_close(dense[1], sparse[1], rtol=0, atol=1e-9)


def test_sampled_pairs_find_the_planted_clusters_too():
    x, topology, true = planted()
    sampled = RDGAESettings(
        0.6, 0.3, pretrain_epochs=40, cluster_epochs=40, restarts=3, members=2, exact_nodes=100
    )
    labels, confidence = rdgae_labels(x, topology, 3, sampled, 0)
    assert matched_accuracy(contingency(labels, true, 3, 3)) > 0.95
    assert not torch.equal(confidence, rdgae_labels(x, topology, 3, QUICK, 0)[1])


def test_row_normalised_words_are_restored():
    words = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    normalised = words / words.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(restored_counts(normalised), words)
    sparse = SparseRows(*normalised.nonzero(as_tuple=True), normalised[normalised > 0], (3, 4))
    found = restored_counts(sparse)
    assert isinstance(found, SparseRows)
    torch.testing.assert_close(found.value, torch.ones(4))
    for given in (words, -normalised, normalised * 2):
        assert restored_counts(given) is given


def test_published_settings_and_the_rule_for_others():
    assert settings_for("cora", 7) == RDGAESettings(0.33, 0.18, 0.01, 15, 20, 120)
    assert settings_for("citeseer", 6) == RDGAESettings(0.20, 0.10, 0.001, 1, 50, 150)
    assert settings_for("pubmed", 3) == RDGAESettings(0.30, 0.40, 0.001, 5, 50, 100)
    assert settings_for("wikics", 10) == RDGAESettings(0.2, 0.1)


def test_bad_input_says_what_to_do():
    x, topology, _ = planted()
    for wrong in (1, 241):
        with pytest.raises(UserError, match="Choose between 2"):
            rdgae_labels(x, topology, wrong, QUICK, 0)
    with pytest.raises(UserError, match="features of 10 nodes"):
        rdgae_labels(x[:10], topology, 3, QUICK, 0)
    with pytest.raises(UserError, match="this graph has none"):
        rdgae_labels(x[:10], topology_from_pairs([], 10), 3, QUICK, 0)
    with pytest.raises(UserError, match="diverged"):
        rdgae_labels(x * 1e300, topology, 3, QUICK, 0)
