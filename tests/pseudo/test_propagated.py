"""k-means on propagated features: smoothing against a dense matrix, bounded pieces, sketches, and
planted clusters.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

from cimage_dist.errors import UserError
from cimage_dist.pseudo import propagated
from cimage_dist.pseudo.propagated import (
    PropagatedSettings,
    gcn_scale,
    propagated_labels,
    sampled,
    settings_for,
    smooth,
)
from cimage_dist.types import Features, SparseRows, Topology
from tests.graphs import random_topology, star, topology_from_pairs


def dense_gcn(topology: Topology) -> torch.Tensor:
    """D̂^-1/2 (A + I) D̂^-1/2 as a matrix."""
    a = torch.eye(topology.num_nodes, dtype=torch.float64)
    a[topology.rows(), topology.indices.long()] = 1
    scale = a.sum(1).rsqrt()
    return scale[:, None] * a * scale


def sparse(x: torch.Tensor) -> SparseRows:
    row, column = x.nonzero(as_tuple=True)
    return SparseRows(row, column, x[row, column], (x.shape[0], x.shape[1]))


def planted(
    per_block: int = 60, blocks: int = 3, width: int = 12, seed: int = 0
) -> tuple[torch.Tensor, Topology, np.ndarray]:
    """Blocks with many edges inside and few between; features hint at the block so weakly that rows
    alone do not show it.
    """
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(blocks), per_block)
    draws = rng.random((y.size, y.size))
    pairs = np.argwhere(draws < np.where(y[:, None] == y[None], 0.15, 0.01))
    x = rng.random((y.size, width)) + 0.25 * (np.arange(width) % blocks == y[:, None])
    return torch.from_numpy(x), topology_from_pairs(pairs, y.size), y


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_smoothing_equals_the_dense_matrix_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """The hub of the star has more messages than a piece holds, the last node none."""
    monkeypatch.setattr(propagated, "_CHUNK_EDGES", chunk)
    hub = star(9)
    topology = Topology(torch.cat([hub.indptr, hub.indptr[-1:]]), hub.indices.to(torch.int32))
    z = torch.randn(11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(smooth(z, topology, gcn_scale(topology, z)), dense_gcn(topology) @ z)


def test_labels_and_confidence_are_those_of_kmeans_on_the_dense_product() -> None:
    x, topology, y = planted()
    settings = PropagatedSettings(hops=2)
    labels, confidence = propagated_labels(x, topology, 3, settings, seed=0)
    assert labels.dtype == torch.int64 and confidence.dtype == torch.float64
    assert adjusted_rand_score(y, labels.numpy()) > 0.9
    rows = torch.nn.functional.normalize(dense_gcn(topology) @ dense_gcn(topology) @ x, dim=1)
    centres = torch.stack([rows[labels == c].mean(0) for c in range(3)])
    distances = torch.cdist(rows, centres).square().sort(dim=1)
    assert torch.equal(
        distances.indices[:, 0], labels
    )  # Lloyd's fixed point, so the means are the centres it stopped at
    torch.testing.assert_close(confidence, distances.values[:, 1] - distances.values[:, 0])


def test_smoothing_is_what_finds_the_blocks() -> None:
    x, topology, y = planted()
    scores = [
        adjusted_rand_score(
            y, propagated_labels(x, topology, 3, PropagatedSettings(hops=hops), seed=0)[0].numpy()
        )
        for hops in (0, 3)
    ]
    assert scores[0] < 0.9 < scores[1]


@pytest.mark.parametrize("width", [12, 5])
def test_sparse_rows_give_the_labels_of_dense_ones(width: int) -> None:
    """With width 5 both are sketched."""
    x, topology, _ = planted()
    x = x * (x > 0.5)
    kinds: list[Features] = [x, sparse(x)]
    (a, a_sure), (b, b_sure) = (
        propagated_labels(kind, topology, 3, PropagatedSettings(width=width), seed=0)
        for kind in kinds
    )
    assert torch.equal(a, b)
    torch.testing.assert_close(a_sure, b_sure)


def test_narrow_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, topology, _ = planted()
    whole = propagated_labels(x, topology, 3, PropagatedSettings(), seed=0)
    monkeypatch.setattr(propagated, "_BLOCK_COLUMNS", 5)
    narrow = propagated_labels(x, topology, 3, PropagatedSettings(), seed=0)
    assert torch.equal(whole[0], narrow[0]) and torch.equal(whole[1], narrow[1])


def test_a_sketch_keeps_the_clusters_and_needs_fewer_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, topology, y = planted(width=600)
    seen: list[int] = []
    monkeypatch.setattr(
        propagated, "smooth", lambda z, *rest: (seen.append(z.shape[1]), smooth(z, *rest))[1]
    )
    labels, _ = propagated_labels(x - x.mean(0), topology, 3, PropagatedSettings(width=100), seed=0)
    assert sum(seen) == 100 * PropagatedSettings.hops and max(seen) <= 64
    assert adjusted_rand_score(y, labels.numpy()) > 0.9


def test_kmeans_may_see_a_sample_only() -> None:
    gids = torch.arange(10_000)
    chosen = sampled(gids, 10_000, 1000, seed=0)
    assert 850 < int(chosen.sum()) < 1150
    assert torch.equal(sampled(gids[4000:], 10_000, 1000, seed=0), chosen[4000:])
    assert sampled(gids, 10_000, 10_000, seed=0).all()
    x, topology, y = planted()
    labels, _ = propagated_labels(x, topology, 3, PropagatedSettings(fit_rows=90), seed=0)
    assert adjusted_rand_score(y, labels.numpy()) > 0.9


def test_half_precision_features_are_raised() -> None:
    x, topology, y = planted()
    labels, _ = propagated_labels(x.half(), topology, 3, PropagatedSettings(width=8), seed=0)
    assert adjusted_rand_score(y, labels.numpy()) > 0.8


def test_same_seed_same_labels_and_torch_generator_untouched() -> None:
    x, topology, _ = planted()
    state = torch.get_rng_state()
    a, b = (
        propagated_labels(x, topology, 4, PropagatedSettings(width=6), seed=3) for _ in range(2)
    )
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert torch.equal(state, torch.get_rng_state())


def test_progress_ends_at_its_total() -> None:
    x, topology, _ = planted()
    ticks: list[tuple[int, int]] = []
    propagated_labels(
        x,
        topology,
        3,
        PropagatedSettings(hops=2),
        seed=0,
        tick=lambda step, total, values, stage: ticks.append((step, total)),
    )
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_rule_by_size() -> None:
    assert settings_for(3_000).restarts == 10 and settings_for(1_000_000).restarts == 1
    assert (
        settings_for(3_000).width > 3_000
        and settings_for(1_000_000).width == 268
        and settings_for(111_000_000).width == 64
    )


@pytest.mark.parametrize(
    ("nodes", "clusters", "words"),
    [(30, 1, "1 clusters"), (30, 31, "31 clusters of 30"), (29, 3, "29 nodes were given")],
)
def test_bad_input_is_explained(nodes: int, clusters: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        propagated_labels(
            torch.ones(nodes, 2), random_topology(30, 60), clusters, PropagatedSettings(), seed=0
        )
