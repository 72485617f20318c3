"""Sharded redundancy loss: shares add up to the single-process value, and gradients are its gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.stats.redundancy import redundancy_loss
from tests.procs import run_ranks

N, WIDTH = 50, 6


def shares(comm: Comm, cuts: list[int]) -> dict[str, Any]:
    """Share and gradient to shared weights of every form, on this rank's rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, N, 7, dtype=torch.float64, generator=generator) + 3
    start = torch.randn(7, WIDTH, dtype=torch.float64, generator=generator)
    labels, weight = torch.arange(N) % 5 - 1, (torch.arange(N) % 4).clamp(max=2).float()
    mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
    conditional = {"labels": labels[mine], "num_clusters": 4, "in_context": torch.tensor([True, False, False])}
    forms: dict[str, dict[str, Any]] = {
        "plain": {},
        "weighted": {"weight": weight[mine]},
        "conditional": conditional,
        "conditional weighted": {**conditional, "weight": weight[mine]},
    }
    out = {}
    for name, options in forms.items():
        projection = start.clone().requires_grad_()
        share = redundancy_loss(x[0, mine] @ projection, x[1, mine] @ projection, mu=0.02, comm=comm, **options)
        (comm.world * share).backward()
        assert projection.grad is not None
        out[name] = {"share": float(share.detach()), "grad": projection.grad.numpy()}
    return out


@pytest.mark.parametrize("cuts", [[0, 25, 50], [0, 50, 50], [0, 11, 12, 50], [0, 0, 30, 50]])
def test_shares_add_up_and_gradients_are_exact(cuts):
    single = shares(Comm(), [0, N])
    results = run_ranks(shares, len(cuts) - 1, cuts)
    for name, expected in single.items():
        assert np.abs(expected["grad"]).max() > 1e-4
        # float64 throughout; only the order of summation differs. Gradients are averaged, as DDP does.
        np.testing.assert_allclose(sum(r[name]["share"] for r in results), expected["share"], rtol=0, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(np.mean([r[name]["grad"] for r in results], axis=0), expected["grad"], rtol=0, atol=1e-12, err_msg=name)
