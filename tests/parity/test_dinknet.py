"""Dink-Net and k-means on propagated features at 1, 2 and 3 ranks: losses, gradients and embeddings
in double precision, and labels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.pseudo.dinknet import _Run, dinknet_labels
from cimage_dist.pseudo.dinknet_model import Nodes, clustering_loss, discrimination_loss
from cimage_dist.pseudo.propagated import PropagatedSettings, propagated_labels
from tests.procs import run_ranks
from tests.pseudo.test_dinknet import NUM_FEATURES, NUM_NODES, QUICK, WIDTH, toy
from tests.pseudo.test_propagated import planted, sparse

BATCHES = {
    "full": torch.arange(NUM_NODES),
    "part": torch.tensor([31, 4, 0, 17, 22, 9, 38]),
    "one": torch.tensor([12]),
}


def shares(comm: Comm) -> dict[str, Any]:
    """Sums over ranks of losses and gradients, and this rank's rows of H with their ids; `one`
    leaves some ranks without a node.
    """
    x, topology, model = toy()
    start = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    out: dict[str, Any] = {}
    for kind, given in (("dense", x), ("sparse", sparse(x))):
        nodes = Nodes(given, topology, comm)
        for name, gids in BATCHES.items():
            batch = nodes.everything if name == "full" else nodes.batch(gids)
            centres = start.clone().requires_grad_()
            real, fake = nodes.real_and_fake(batch, model.weight, key=7)
            disc = discrimination_loss(model.logits(real), model.logits(fake), gids.numel())
            h = nodes.batch_embedding(model, batch, 3)
            share = clustering_loss(h, centres, gids.numel(), comm) + 0.5 * disc
            grads = torch.autograd.grad(share, [centres, *model.parameters()])
            out[f"{kind} {name}"] = {
                "values": comm.sum(torch.stack([disc, share])).numpy(),
                "grads": [comm.sum(grad).numpy() for grad in grads],
                "h": comm.gather_rows(h).numpy(),
                "fake": comm.gather_rows(fake.detach()).numpy(),
            }
        out[f"{kind} whole"] = comm.gather_rows(nodes.embedding(model, 3)).numpy()
    return out


def labels(comm: Comm) -> dict[str, Any]:
    x, topology, _ = planted()
    out: dict[str, Any] = {}
    kinds = {
        "full": QUICK,
        "batches": replace(QUICK, batch=50, pretrain_epochs=4, finetune_lr=1e-2),
        "bounded": replace(QUICK, batch=64, pretrain_epochs=4, whole_values=0, fit_rows=100),
        "trained on": replace(QUICK, tradeoff=1.0),
    }
    for name, settings in kinds.items():
        ticks: list[tuple[int, float]] = []
        run = _Run(
            x,
            topology,
            settings,
            0,
            comm,
            lambda step, total, values, stage, seen=ticks: seen.append((step, values["loss"])),
        )
        run.pretrain(3)
        found = run.finetune(run.first_centres(4))
        weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
        out[name] = found[0].numpy(), found[1].numpy(), np.array(ticks), weights.numpy()
    for width in (12, 2):  # two columns: a third rank has none
        out[f"propagated {width}"] = tuple(
            t.numpy()
            for t in propagated_labels(
                x, topology, 3, PropagatedSettings(width=width, fit_rows=150), seed=1, comm=comm
            )
        )
    out["direct"] = tuple(
        t.numpy()
        for t in dinknet_labels(
            sparse(x), topology, 3, replace(QUICK, pretrain_epochs=5, rounds=3), seed=1, comm=comm
        )
    )
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_losses_gradients_and_embeddings_do_not_depend_on_the_ranks(world: int) -> None:
    single = shares(Comm())
    assert (
        single["dense full"]["grads"][1].shape == (NUM_FEATURES, WIDTH)
        and np.abs(single["dense full"]["grads"][1]).max() > 1e-4
    )
    for rank in run_ranks(shares, world):
        for name, expected in single.items():
            if name.endswith("whole"):
                np.testing.assert_allclose(rank[name], expected, rtol=0, atol=1e-13, err_msg=name)
                continue
            # Double precision throughout; only the order of summation differs.
            for key in ("values", "h", "fake"):
                np.testing.assert_allclose(
                    rank[name][key], expected[key], rtol=0, atol=1e-13, err_msg=f"{name} {key}"
                )
            for got, wanted in zip(rank[name]["grads"], expected["grads"], strict=True):
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("world", [2, 3])
def test_labels_do_not_depend_on_the_ranks(world: int) -> None:
    single = labels(Comm())
    ranks = run_ranks(labels, world)
    for name, expected in single.items():
        for rank in ranks:
            np.testing.assert_array_equal(rank[name][0], expected[0], err_msg=name)
            np.testing.assert_allclose(rank[name][1], expected[1], rtol=0, atol=1e-8, err_msg=name)
            for got, wanted in zip(
                rank[name][2:], expected[2:], strict=True
            ):  # progress and weights
                np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-8, err_msg=name)
            for got, first in zip(rank[name], ranks[0][name], strict=True):
                np.testing.assert_array_equal(
                    got, first, err_msg=f"{name}: ranks must hold the same bits"
                )
