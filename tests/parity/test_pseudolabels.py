"""The confident set and its growth are the same sets at 1, 2 and 3 ranks, uneven or empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cimage_dist.ci.pseudolabels import grow_confident, select_confident
from cimage_dist.comm import Comm
from tests.ci.test_pseudolabels import clusters
from tests.procs import run_ranks

GROWTH: tuple[dict[str, Any], ...] = (
    {"threshold": 0.97},
    {"threshold": 0.97, "agree": True},
    {"threshold": 0.97, "bank_size": 12, "seed": 3},
    {"rule": "mean", "threshold": 0.93},
    {"rule": "quantile"},
)


def choose(comm: Comm, cuts: list[int]) -> dict[str, Any]:
    """gids of the base and of each grown set on this rank."""
    z, labels, confidence, gids = clusters()
    mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
    z, labels, confidence, gids = z[mine], labels[mine], confidence[mine], gids[mine]
    base = select_confident(labels, confidence, gids, min_per_cluster=5, comm=comm)
    grown = [
        grow_confident(z, labels, base, gids, chunk_rows=64, comm=comm, **options)
        for options in GROWTH
    ]
    return {
        "base": gids[base].tolist(),
        "sets": [gids[g.mask].tolist() for g in grown],
        "added": [g.added for g in grown],
        "norms": grown[0].mu_norms.numpy(),
    }


def choose_all(comm: Comm, splits: list[list[int]]) -> list[dict[str, Any]]:
    return [choose(comm, cuts) for cuts in splits]


@pytest.mark.parametrize("splits", [[[0, 137, 500]], [[0, 21, 260, 500], [0, 0, 500, 500]]])
def test_sets_do_not_depend_on_the_number_of_ranks(splits: list[list[int]]) -> None:
    """Two ranks; three ranks, and three of which two are empty."""
    single = choose(Comm(), [0, 500])
    assert all(count > 0 for count in single["added"])
    by_rank = run_ranks(choose_all, len(splits[0]) - 1, splits)
    for results in zip(*by_rank, strict=True):
        assert sorted(gid for r in results for gid in r["base"]) == sorted(single["base"])
        for i in range(len(GROWTH)):
            assert sorted(gid for r in results for gid in r["sets"][i]) == sorted(single["sets"][i])
        for r in results:
            assert r["added"] == single["added"]
            assert np.array_equal(r["norms"], single["norms"])  # fixed-point sums: the same bits
