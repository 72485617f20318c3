"""Sharded k-means equals one process: identical assignments, centres to rounding, whatever the
split of the rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.pseudo import contingency, hard_modularity
from cimage_dist.pseudo.kmeans import kmeans
from cimage_dist.types import Topology
from tests.procs import run_ranks

NUM_ROWS, DIM = 403, 5


def rows() -> torch.Tensor:
    return torch.randn(
        NUM_ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(11)
    )


def ring(num_nodes: int) -> Topology:
    gids = torch.arange(num_nodes)
    neighbours = (
        torch.stack([(gids - 1) % num_nodes, (gids + 1) % num_nodes], dim=1).sort(dim=1).values
    )
    return Topology(torch.arange(0, 2 * num_nodes + 1, 2), neighbours.flatten())


def shares(world: int, kind: str) -> list[torch.Tensor]:
    """Global ids of each rank."""
    gids = torch.arange(NUM_ROWS)
    if kind == "even":
        return [gids[NUM_ROWS * r // world : NUM_ROWS * (r + 1) // world] for r in range(world)]
    if kind == "empty rank":
        return (
            [gids[:0] if r == world - 1 else gids[r :: max(world - 1, 1)] for r in range(world)]
            if world > 1
            else [gids]
        )
    return [gids.flip(0)[r::world] for r in range(world)]


def far_start() -> torch.Tensor:
    """Two of five centres attract no row."""
    return torch.cat([rows()[:3], torch.full((2, DIM), 1e3, dtype=torch.float64)])


def cases() -> dict[str, dict[str, Any]]:
    return {
        "plain": {"num_clusters": 9, "seed": 3},
        "restarts": {"num_clusters": 6, "seed": 1, "restarts": 3},
        "spherical": {"num_clusters": 6, "seed": 2, "spherical": True},
        "sampled start": {"num_clusters": 1, "seed": 4},
        "forced empty": {"num_clusters": 5, "seed": 0, "init": far_start()},
        "small chunks": {"num_clusters": 9, "seed": 3, "chunk_rows": 17},
    }


def cluster(comm: Comm, kind: str) -> dict[str, Any]:
    gids = shares(comm.world, kind)[comm.rank]
    x = rows()[gids]
    out: dict[str, Any] = {}
    for name, options in cases().items():
        result = kmeans(x, **options, gids=None if kind == "even" else gids, comm=comm)
        out[name] = (
            gids.numpy(),
            result.labels.numpy(),
            result.centres.numpy(),
            result.inertia,
            result.iterations,
            result.confidence.numpy(),
        )
    duplicates = rows()[:2].repeat(NUM_ROWS, 1)[:NUM_ROWS][gids]
    out["duplicates"] = kmeans(duplicates, 4, seed=0, gids=gids, comm=comm).labels.unique().tolist()
    half = kmeans(x.to(torch.bfloat16), 4, seed=0, gids=gids, comm=comm)
    out["half"] = half.centres.numpy(), half.inertia
    true = gids % 4 - 1
    out["table"] = contingency(gids % 3, true, 3, 3, comm).numpy()
    out["modularity"] = hard_modularity(torch.arange(NUM_ROWS) // 50, ring(NUM_ROWS), comm)
    return out


@pytest.mark.parametrize(("world", "kind"), [(2, "even"), (3, "empty rank"), (3, "reversed")])
def test_sharded_equals_single(world: int, kind: str) -> None:
    single = cluster(Comm(), "even")
    ranks = run_ranks(cluster, world, kind)
    for name in cases():
        _, labels, centres, inertia, iterations, confidence = single[name]
        for rank in ranks:
            gids, rank_labels, rank_centres, rank_inertia, rank_iterations, rank_confidence = rank[
                name
            ]
            np.testing.assert_array_equal(rank_labels, labels[gids], err_msg=name)
            np.testing.assert_allclose(rank_centres, centres, rtol=0, atol=1e-12, err_msg=name)
            np.testing.assert_array_equal(
                rank_centres, ranks[0][name][2], err_msg=f"{name}: ranks must hold the same bits"
            )
            np.testing.assert_allclose(
                rank_confidence, confidence[gids], rtol=0, atol=1e-11, err_msg=name
            )
            assert (
                rank_inertia == pytest.approx(inertia, rel=1e-12) and rank_iterations == iterations
            )
    assert np.bincount(single["forced empty"][1], minlength=5).min() > 0
    for rank in ranks:
        assert len(rank["duplicates"]) <= 2  # two distinct points; none on the rank without rows
        # bfloat16 rows are exact in the float32 arithmetic; sums differ by its rounding only.
        np.testing.assert_allclose(rank["half"][0], single["half"][0], atol=1e-5)
        np.testing.assert_array_equal(rank["table"], single["table"])
        assert rank["modularity"] == single["modularity"]
