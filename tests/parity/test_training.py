"""The same experiment on 1, 2 and 3 gloo ranks: losses, weights and partitions in float64 (dropout
0; all neighbours, or keyed draws).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.ingest import open_graph
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import MemorySink
from cimage_dist.train.trainer import Trainer
from tests.conftest import small_sbm_settings
from tests.procs import run_ranks
from tests.settings import ROUTING

FULL_OBJECTIVE = [
    *ROUTING,
    "model.num_factors=4",
    "model.factor_dim=3",
    "model.num_layers=2",
    "model.routing_iterations=3",
    "model.dropout=0",
    "model.structure_dropout=0",
    "model.factor_dropout=0",
    "loss.factor_weight=0.7",
    "loss.cluster_weight=0.4",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=2",
    "cluster.restarts=2",
    "ci.every_steps=4",
    "run.log_every=1",
]
FULL_GRAPH = [*FULL_OBJECTIVE, "train.epochs=20"]
SAMPLED = [
    *FULL_OBJECTIVE,
    "train.epochs=2",
    "sampler.fanouts=[-1,-1,-1]",
    "sampler.batch_edges=97",
    "sampler.hide_rate=0.2",
]
# One cap for all hops of the receptive field: draws are keyed by node, so a node's neighbours do
# not depend on who samples it.
CAPPED = [*SAMPLED, "sampler.fanouts=[4,4,4]", "sampler.backend=csr"]
SETTINGS = {"full": FULL_GRAPH, "sampled": SAMPLED, "capped": CAPPED}


def settings(kind: str, store_dir: Path, *more: str) -> Config:
    return load_config(overrides=[*small_sbm_settings(store_dir), *SETTINGS[kind], *more])


def train(
    comm: Comm, kind: str, store_dir: Path, dtype: torch.dtype = torch.float64, *more: str
) -> dict[str, Any]:
    torch.set_default_dtype(dtype)
    try:
        cfg = settings(kind, store_dir, *more)
        sink = MemorySink()
        trainer = worker(cfg, comm, sink, open_graph(cfg.data))
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "loss": [r["loss"] for r in sink.records if r["kind"] == "train"],
        "terms": sorted(k for k in sink.records[-1] if k in ("structure", "factor", "cluster")),
        "context": [r["context"] for r in sink.records if r["kind"] == "ci"],
        "confident": [r["confident"] for r in sink.records if r["kind"] == "ci"],
        "labels": sink.stored["pseudo-labels"]["labels"].numpy(),
        "weights": {
            name: value.cpu().numpy()
            for name, value in trainer.model.state_dict().items()
            if value.is_floating_point()
        },
    }


@pytest.mark.parametrize(
    "kind", ["full", "sampled", pytest.param("capped", marks=pytest.mark.slow)]
)
def test_world_size_does_not_change_the_experiment(kind, store_dir, small_sbm):
    alone = train(Comm(), kind, store_dir)
    assert alone["terms"] == ["cluster", "factor", "structure"]
    assert len(alone["loss"]) >= 20 and len(alone["context"]) >= 3
    for world in (2, 3):
        shutil.rmtree(store_dir / "labels")  # several ranks make their labels themselves
        for result in run_ranks(train, world, kind, store_dir):
            np.testing.assert_array_equal(result["labels"], alone["labels"])
            assert result["context"] == alone["context"]
            assert result["confident"] == alone["confident"]
            # Sums over ranks differ in their last bits and Adam divides by small numbers: 1e-9 over
            # twenty steps.
            np.testing.assert_allclose(result["loss"], alone["loss"], rtol=0, atol=1e-9)
            for name, value in alone["weights"].items():
                np.testing.assert_allclose(
                    result["weights"][name], value, rtol=0, atol=1e-9, err_msg=name
                )


def gradients(comm: Comm, kind: str, store_dir: Path) -> dict[str, np.ndarray]:
    """Gradients of the whole objective at the first step, after DDP's averaging."""
    torch.set_default_dtype(torch.float64)
    try:
        cfg = settings(kind, store_dir)
        graph = open_graph(cfg.data)
        trainer = Trainer(cfg, graph, graph.topology(), comm)
        from cimage_dist.train.refresh import random_scores
        from cimage_dist.train.step import loss_terms, objective

        batch = next(trainer.remaining())[0]
        trainer.model.train()
        terms = loss_terms(trainer.wrapped, batch, cfg, random_scores(4, 0), comm)
        (comm.world * objective(terms, cfg)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        name: p.grad.numpy() for name, p in trainer.model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_gradients_of_the_objective_do_not_depend_on_the_world_size(kind, store_dir, small_sbm):
    alone = gradients(Comm(), kind, store_dir)
    assert max(float(np.abs(g).max()) for g in alone.values()) > 1e-3
    for world in (2, 3):
        for result in run_ranks(gradients, world, kind, store_dir):
            assert result.keys() == alone.keys()
            for name, value in alone.items():
                np.testing.assert_allclose(result[name], value, rtol=0, atol=1e-12, err_msg=name)


def empty_target(comm: Comm, store_dir: Path) -> float:
    """One step in which no factor is left to predict."""
    cfg = settings("full", store_dir)
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    from cimage_dist.train.refresh import random_scores

    everything = torch.ones(4, dtype=torch.bool)
    trainer.scores = random_scores(4, 0).__class__(
        everything.double(), everything, 0.0, 0.0, everything.double(), 0, "test"
    )
    return float(trainer.advance(next(trainer.remaining()))["factor"])


def test_ddp_completes_a_step_with_an_empty_context(store_dir, small_sbm):
    assert run_ranks(empty_target, 2, store_dir) == [0.0, 0.0]


def tiny_batches(comm: Comm, store_dir: Path) -> list[float]:
    """A global batch smaller than the world: some rank has nothing to do."""
    cfg = load_config(
        overrides=[
            *small_sbm_settings(store_dir),
            *SAMPLED,
            "sampler.batch_edges=2",
            "loss.factor_weight=0",
            "model.num_layers=1",
        ]
    )
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    batches = trainer.remaining()
    return [float(comm.sum(trainer.advance(next(batches))["structure"])) for _ in range(3)]


def test_fewer_edges_than_ranks_does_not_hang(store_dir, small_sbm):
    alone = tiny_batches(Comm(), store_dir)
    for losses in run_ranks(tiny_batches, 3, store_dir):
        np.testing.assert_allclose(losses, alone, rtol=1e-4)  # float32
