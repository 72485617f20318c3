"""Embeddings between steps: exact on the full graph, keyed samples otherwise, never with dropout or
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.nn.inference import encode_graph
from cimage_dist.train import refresh as embedder_module
from cimage_dist.train.refresh import FullEmbedder, SampledEmbedder
from cimage_dist.train.trainer import Trainer
from tests.settings import ROUTING, small_sbm_config

MODEL = [
    *ROUTING,
    "model.num_factors=4",
    "model.factor_dim=3",
    "model.num_layers=2",
    "model.routing_iterations=3",
    "model.dropout=0.5",
]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_trainer(store_dir: Path, graph: object, *overrides: str) -> Trainer:
    cfg = small_sbm_config(store_dir, *MODEL, *overrides)
    return Trainer(cfg, graph, graph.topology(), Comm())  # type: ignore[arg-type,attr-defined]


def test_full_graph_rows_come_in_the_order_asked_for(store_dir, small_sbm):
    trainer = make_trainer(store_dir, small_sbm)
    assert isinstance(trainer.embedder, FullEmbedder)
    gids = torch.tensor([250, 3, 3, 0])
    whole = encode_graph(trainer.model.encoder, small_sbm.features(), small_sbm.topology())
    got = trainer.embedder(trainer.model.encoder, gids, 7)
    assert torch.equal(got.h, whole.h[gids]) and torch.equal(got.z, whole.z[gids])


def test_all_neighbours_equal_the_full_graph(store_dir, small_sbm, double):
    trainer = make_trainer(store_dir, small_sbm, "sampler.fanouts=[-1,-1,-1]")
    assert isinstance(trainer.embedder, SampledEmbedder)
    gids = torch.tensor([5, 250, 17, 17, 0])
    whole = encode_graph(trainer.model.encoder, small_sbm.features().double(), small_sbm.topology())
    got = trainer.embedder(trainer.model.encoder, gids, 3)
    torch.testing.assert_close(got.h, whole.h[gids], rtol=0, atol=1e-10)
    torch.testing.assert_close(got.z, whole.z[gids], rtol=0, atol=1e-10)


@pytest.mark.parametrize("fanouts", ["[]", "[3,3,3]"])
def test_eval_mode_without_gradient_and_the_mode_is_given_back(fanouts, store_dir, small_sbm):
    trainer = make_trainer(store_dir, small_sbm, f"sampler.fanouts={fanouts}")
    encoder, gids = trainer.model.encoder, torch.arange(20)
    trainer.advance(next(trainer.remaining()))  # batch normalisation has something to remember
    encoder.eval()
    quiet = trainer.embedder(encoder, gids, 1)
    assert not encoder.training
    encoder.train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    busy = trainer.embedder(encoder, gids, 1)
    assert encoder.training and not busy.z.requires_grad
    assert torch.equal(busy.h, quiet.h) and torch.equal(busy.z, quiet.z)  # dropout 0.5 would show
    torch.testing.assert_close(encoder.state_dict(), before, rtol=0, atol=0)


def test_samples_are_keyed_by_step_and_node_not_by_company(
    store_dir, small_sbm, monkeypatch, double
):
    """One fan-out for all hops that cover the receptive field: a node's embedding does not depend
    on who is embedded with it.
    """
    trainer = make_trainer(store_dir, small_sbm, "sampler.fanouts=[3,3,3]", "sampler.backend=csr")
    encoder, gids = trainer.model.encoder, torch.arange(300)
    together = trainer.embedder(encoder, gids, 4)
    assert torch.equal(trainer.embedder(encoder, gids, 4).z, together.z)
    assert not torch.allclose(trainer.embedder(encoder, gids, 5).z, together.z, atol=1e-3)
    monkeypatch.setattr(embedder_module, "_CHUNK_NODES", 7)
    torch.testing.assert_close(
        trainer.embedder(encoder, gids, 4).z, together.z, rtol=0, atol=1e-12
    )  # order of sums
    torch.testing.assert_close(
        trainer.embedder(encoder, gids[::5], 4).h, together.h[::5], rtol=0, atol=1e-12
    )


def test_no_nodes_no_rows(store_dir, small_sbm):
    trainer = make_trainer(store_dir, small_sbm, "sampler.fanouts=[2]")
    found = trainer.embedder(trainer.model.encoder, torch.empty(0, dtype=torch.int64), 0)
    assert found.h.shape == found.z.shape == (0, 4, 3)


def test_the_held_out_edges_are_not_used(store_dir, small_sbm):
    """The embedder is given the training topology: on a graph without edges a node is its own
    projection, whatever its neighbours.
    """
    trainer = make_trainer(store_dir, small_sbm, "sampler.fanouts=[-1,-1,-1]")
    alone = small_sbm.topology()
    alone = type(alone)(torch.zeros_like(alone.indptr), alone.indices[:0])
    lonely = SampledEmbedder(small_sbm.x, alone, trainer.cfg, torch.device("cpu"))
    gids = torch.arange(10)
    got = lonely(trainer.model.encoder, gids, 0)
    want = encode_graph(trainer.model.encoder, small_sbm.features(), alone)
    torch.testing.assert_close(got.z, want.z[gids], rtol=0, atol=1e-6)
