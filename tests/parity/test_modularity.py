"""Sharded modularity losses: the mean over ranks is the single-process value, the mean of gradients
its gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.losses import modularity_edges, modularity_full
from cimage_dist.types import EdgeList
from tests.losses.test_modularity import symmetric_edges
from tests.procs import run_ranks

N, WIDTH = 40, 5


def model() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 7, generator=generator, dtype=torch.float64)
    return x, torch.randn(7, WIDTH, generator=generator, dtype=torch.float64)


def worker_losses(comm: Comm, cuts: list[int]) -> list[dict[str, Any]]:
    """Value and gradient of the full form and of both edge-batch forms on this rank.

    Full form: each rank owns a range of targets with all their edges, and computes the rows it
    needs itself.
    """
    x, start = model()
    edges = symmetric_edges(N)
    begin, end = comm.slice_of(N)
    mine = (edges.dst >= begin) & (edges.dst < end)
    pick = torch.randint(0, edges.src.numel(), (64,), generator=torch.Generator().manual_seed(5))[
        cuts[comm.rank] : cuts[comm.rank + 1]
    ]
    out = []
    for form in ("full", "directed", "undirected"):
        weight = start.clone().requires_grad_()
        z = x @ weight
        if form == "full":
            loss = modularity_full(z, EdgeList(edges.src[mine], edges.dst[mine], N), comm)
        else:
            loss = modularity_edges(
                z[edges.src[pick]], z[edges.dst[pick]], comm, is_symmetric=form == "undirected"
            )
        loss.backward()
        assert weight.grad is not None
        out.append({"loss": float(loss.detach()), "grad": weight.grad.numpy()})
    return out


@pytest.mark.parametrize("cuts", [[0, 64, 64], [0, 10, 43, 64]])
def test_mean_over_ranks_is_exact(cuts: list[int]) -> None:
    """Batches of 64/0 and 10/33/21 edges."""
    single = worker_losses(Comm(), [0, 64])
    results = run_ranks(worker_losses, len(cuts) - 1, cuts)
    for form, expected in enumerate(single):
        # float64 throughout; only the order of summation differs.
        np.testing.assert_allclose(
            np.mean([r[form]["loss"] for r in results]), expected["loss"], rtol=0, atol=1e-13
        )
        np.testing.assert_allclose(
            np.mean([r[form]["grad"] for r in results], axis=0),
            expected["grad"],
            rtol=0,
            atol=1e-13,
        )
