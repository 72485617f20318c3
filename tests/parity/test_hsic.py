"""CI scores at 1, 2 and 3 ranks: statistics to 1e-12, the same partition and the same
diagnostics.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.ci.diagnostics import describe_partition
from cimage_dist.ci.hsic import HsicStats, averaged, block_statistics, conditional_statistics
from cimage_dist.ci.partition import choose_partition
from cimage_dist.comm import Comm
from tests.procs import run_ranks

N, K, C = 500, 8, 3


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (N,), generator=generator)
    h = torch.randn(N, K, C, generator=generator)
    h[:, :3] += 2.0 * torch.randn(4, 3, C, generator=generator)[labels]
    return h, labels, torch.randperm(3 * N, generator=generator)[:N]


def shard(comm: Comm) -> torch.Tensor:
    """Uneven shares in a scattered order; with three ranks the middle one is empty."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(9))
    cuts = {1: [0, N], 2: [0, 123, N], 3: [0, 123, 123, N]}[comm.world]
    return order[cuts[comm.rank] : cuts[comm.rank + 1]]


def arrays(stats: HsicStats) -> dict[str, Any]:
    return {
        "G": stats.G.numpy(),
        "b": stats.b.numpy(),
        "y2": stats.y2,
        "nb": stats.num_blocks,
        "zero": stats.zero_label_fraction,
    }


def disputed(comm: Comm) -> list[bool]:
    """The common partition when each rank has statistics of its own, in which its own factor
    depends on the labels.
    """
    labels = torch.arange(200) % 3
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(comm.rank))
    x[:, comm.rank] += 3.0 * labels
    return choose_partition(
        block_statistics(x, labels, torch.arange(200), seed=0), 8, target=1, comm=comm
    ).in_context.tolist()


def refresh(comm: Comm) -> dict[str, Any]:
    h, labels, gids = data()
    mine = shard(comm)
    x = h[mine].flatten(1)
    stats = block_statistics(x, labels[mine], gids[mine], seed=4, comm=comm)
    conditional = conditional_statistics(x, labels[mine], gids[mine], seed=4, comm=comm)
    classes = block_statistics(x, labels[mine], gids[mine], seed=4, block_classes=2, comm=comm)
    many = block_statistics(x, labels[mine], gids[mine], seed=5, repeats=None, comm=comm)
    average = averaged(stats, many, 0.5)
    scores = choose_partition(stats, K, comm=comm)
    lasso = choose_partition(conditional, K, target=3, comm=comm)
    report = describe_partition(h[mine], labels[mine], gids[mine], scores, comm=comm)
    partitions = [scores.in_context.tolist(), lasso.in_context.tolist()]
    return {
        "stats": [arrays(s) for s in (stats, conditional, classes, many, average)],
        "partitions": partitions,
        "lam": scores.lam,
        "report": report,
        "disputed": disputed(comm),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_refresh_does_not_depend_on_the_number_of_ranks(world: int) -> None:
    single = refresh(Comm())
    assert 0 < sum(single["partitions"][0]) < K
    for result in run_ranks(refresh, world):
        for got, expected in zip(result["stats"], single["stats"], strict=True):
            for name in got:
                # The same block sums in another order.
                np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=1e-12)
        assert result["partitions"] == single["partitions"] and result["lam"] == single["lam"]
        assert result["report"].keys() == single["report"].keys()
        for name, value in result["report"].items():
            np.testing.assert_allclose(value, single["report"][name], rtol=1e-9, atol=1e-12)
        # Ranks with different statistics end with the partition of rank 0 all the same.
        assert result["disputed"] == single["disputed"]
