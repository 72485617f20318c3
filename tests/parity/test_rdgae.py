"""R-DGAE over ranks equals one process: losses and gradients add up, the trained labels are the
same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.nn.projection import compact
from cimage_dist.pseudo import rdgae_loss
from cimage_dist.pseudo.rdgae import rdgae_labels
from tests.procs import run_ranks
from tests.pseudo.test_rdgae import QUICK, embedding, one_way_target, planted


def shares(comm: Comm) -> dict[str, Any]:
    """Each loss and its gradients summed over ranks, and two whole runs."""
    rdgae_loss._TILE = 20  # several tiles for every rank: 6 of the 53 nodes, 78 of the 240
    target, z, centres = one_way_target(), embedding(53), embedding(4, seed=1)
    labels, omega = torch.arange(53) % 4, torch.arange(53) % 3 > 0
    losses = {
        "exact": rdgae_loss.reconstruction_loss(z, target, comm),
        "sampled": rdgae_loss.sampled_reconstruction_loss(z, target, 1001, 5, comm),
        "clustering": rdgae_loss.clustering_loss(z, centres, labels, omega, comm),
    }
    out: dict[str, Any] = {}
    for name, share in losses.items():
        grads = torch.autograd.grad(share, (z, centres), materialize_grads=True)
        out[name] = [comm.sum(value).numpy() for value in (share, *grads)]
    x, topology, _ = planted()
    short = replace(
        QUICK, pretrain_epochs=20, cluster_epochs=22, members=2
    )  # one correction of the target with trusted nodes, one change of the labels
    for name, settings in (("exact run", short), ("sampled run", replace(short, exact_nodes=100))):
        trace: list[float] = []
        found, confidence = rdgae_labels(
            compact(x),
            topology,
            3,
            settings,
            0,
            comm,
            lambda step, total, values, stage, to=trace: to.append(values["loss"]),
        )
        out[name] = [found.numpy(), confidence.numpy(), np.array(trace)]
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_equal_one_process(world: int) -> None:
    tile = rdgae_loss._TILE
    try:
        single = shares(Comm())
    finally:
        rdgae_loss._TILE = tile
    for rank in run_ranks(shares, world):
        for name in ("exact", "sampled", "clustering"):
            for found, want in zip(rank[name], single[name], strict=True):
                # float64 throughout; only the order of summation differs
                np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-13, err_msg=name)
        for name in ("exact run", "sampled run"):
            labels, confidence, trace = rank[name]
            np.testing.assert_array_equal(labels, single[name][0], err_msg=name)
            np.testing.assert_allclose(confidence, single[name][1], rtol=0, atol=1e-8, err_msg=name)
            np.testing.assert_allclose(trace, single[name][2], rtol=1e-9, err_msg=name)
