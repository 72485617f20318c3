"""Sharded redundancy loss: shares add up to the single-process value, and gradients are its
gradient.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.data.ingest import open_graph
from cimage_dist.losses import redundancy_loss
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from tests.parity.test_training import settings
from tests.procs import run_ranks

N, WIDTH = 50, 6


def shares(comm: Comm, cuts: list[int]) -> dict[str, Any]:
    """Share and gradient to shared weights of every form, on this rank's rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, N, 7, dtype=torch.float64, generator=generator) + 3
    start = torch.randn(7, WIDTH, dtype=torch.float64, generator=generator)
    weight = (torch.arange(N) % 4).clamp(max=2).float()
    mine = slice(cuts[comm.rank], cuts[comm.rank + 1])
    forms: dict[str, dict[str, Any]] = {"plain": {}, "weighted": {"weight": weight[mine]}}
    out = {}
    for name, options in forms.items():
        projection = start.clone().requires_grad_()
        share = redundancy_loss(
            x[0, mine] @ projection, x[1, mine] @ projection, mu=0.02, comm=comm, **options
        )
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
        # float64 throughout; only the order of summation differs. Gradients are averaged, as DDP
        # does.
        np.testing.assert_allclose(
            sum(r[name]["share"] for r in results),
            expected["share"],
            rtol=0,
            atol=1e-12,
            err_msg=name,
        )
        np.testing.assert_allclose(
            np.mean([r[name]["grad"] for r in results], axis=0),
            expected["grad"],
            rtol=0,
            atol=1e-12,
            err_msg=name,
        )


REDUNDANCY = [
    "loss.redundancy_weight=0.5",
    "loss.redundancy_decorrelation=0.01",
    "mask.hide_rate=0.3",
    "mask.feature_rate=0.2",
]
ALONE = ["loss.structure_weight=0", "loss.factor_weight=0", "loss.cluster_weight=0"]
TRAINED: dict[str, tuple[str, list[str]]] = {
    "full": ("full", REDUNDANCY),
    "sampled": ("sampled", REDUNDANCY),
    "sampled, alone": ("sampled", [*REDUNDANCY, *ALONE]),
}


def train(comm: Comm, name: str, store_dir: Path) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    try:
        kind, more = TRAINED[name]
        cfg = settings(kind, store_dir, *more)
        sink = MemorySink()
        trainer = worker(cfg, comm, sink, open_graph(cfg.data))
    finally:
        torch.set_default_dtype(torch.float32)
    records = [r for r in sink.records if r["kind"] == "train"]
    state = trainer.state()[0]
    return {
        "loss": [r["loss"] for r in records],
        "redundancy": [r["redundancy"] for r in records],
        "tensors": {k: v.numpy() for k, v in state.items() if k.startswith("model.")},
    }


@pytest.mark.parametrize("name", TRAINED)
def test_two_views_train_alike_on_any_number_of_ranks(name, store_dir, small_sbm):
    alone = train(Comm(), name, store_dir)
    assert len(alone["loss"]) >= 20 and min(map(abs, alone["redundancy"])) > 1e-3
    assert ("model.structure.layers.0.weight" in alone["tensors"]) == ("alone" not in name)
    for world in (2, 3):
        shutil.rmtree(
            store_dir / "labels", ignore_errors=True
        )  # several ranks make their labels themselves
        for result in run_ranks(train, world, name, store_dir):
            # As in test_training: Adam divides rounding by small numbers, 1e-9 over twenty steps.
            for key in ("loss", "redundancy"):
                np.testing.assert_allclose(result[key], alone[key], rtol=0, atol=1e-9, err_msg=key)
            assert result["tensors"].keys() == alone["tensors"].keys()
            for key, value in alone["tensors"].items():
                np.testing.assert_allclose(
                    result["tensors"][key], value, rtol=0, atol=1e-9, err_msg=key
                )
