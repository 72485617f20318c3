"""The settings that `Config()` has, whatever their values: resumption, sampling, and a graph from
memory or from a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data

from cimage_dist import Graph, Pretrainer, load_config, open_graph
from cimage_dist.comm import Comm
from cimage_dist.config import Config, LossConfig, ModelConfig
from cimage_dist.errors import Interrupted
from cimage_dist.io.artifacts import RunDir
from cimage_dist.nn.inference import embed_graph, encode_graph
from cimage_dist.planning import make_plan
from cimage_dist.train.loop import worker
from cimage_dist.train.sink import LocalSink, MemorySink
from cimage_dist.train.step import SampledBatches, train_edges
from cimage_dist.train.trainer import Trainer
from tests.settings import small_sbm_config
from tests.train.test_sampled_training import StopAfter, assert_same_run, without

# The small graph is below the size from which edge factors are the default.
EDGES = "model.edge_factors=4"
LOGGED = [EDGES, "run.log_every=1", "run.checkpoint_every=3", "run.tensorboard=false"]
# Fewer hops than layers: a step propagates as far as its fan-outs, an embedding through all layers.
SHORT = [EDGES, "sampler.fanouts=[4,3]", "sampler.batch_edges=120", "train.epochs=1"]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def losses(sink: MemorySink) -> list[float]:
    return [record["loss"] for record in sink.records if record["kind"] == "train"]


@pytest.mark.parametrize("stop_at", [1, 5])
@pytest.mark.parametrize("kind", ["full", "short fan-outs"])
def test_resumed_equals_uninterrupted_to_the_last_bit(
    kind: str, stop_at: int, store_dir: Path, small_sbm: Graph, tmp_path: Path
) -> None:
    more = SHORT if kind == "short fan-outs" else ["train.epochs=8"]
    cfg = small_sbm_config(store_dir, *LOGGED, *more)
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        whole = worker(cfg, Comm(), sink, small_sbm)
    assert whole.total_steps > 6
    with (
        StopAfter(RunDir(tmp_path / "parts"), cfg.run, steps=stop_at) as stopped,
        pytest.raises(Interrupted),
    ):
        worker(cfg, Comm(), stopped, small_sbm)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        parts = worker(cfg, Comm(), sink, small_sbm)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_loss_falls(store_dir: Path, small_sbm: Graph) -> None:
    sink = MemorySink()
    trainer = worker(small_sbm_config(store_dir, "run.log_every=1"), Comm(), sink, small_sbm)
    found = losses(sink)
    assert len(found) == trainer.total_steps and np.mean(found[-5:]) < np.mean(found[:5])


def test_short_fan_outs_train_that_many_hops_and_embed_all_layers(
    store_dir: Path, small_sbm: Graph, double: None
) -> None:
    settings = [EDGES, "sampler.fanouts=[-1,-1]", "sampler.hide_rate=0", "mask.feature_rate=0"]
    cfg = small_sbm_config(store_dir, *settings, "sampler.batch_edges=4", "model.num_layers=4")
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    encoder, x = trainer.model.encoder.eval(), small_sbm.features().double()
    assert encoder.cfg.propagation == "gcn" and encoder.cfg.num_layers > 2
    assert isinstance(trainer.batches, SampledBatches)
    batch = trainer.batches.source[0]
    step = trainer.batches.convert(batch, 0)
    assert step.hops is not None
    with torch.no_grad():
        z = encoder(step.x, step.edges, step.hops).z
    seeds = batch.pairs.unique()
    seen = without(small_sbm.topology(), batch.node_gids.view(-1, 2))
    layers = encoder.cfg.num_layers
    encoder.cfg.num_layers = 2
    two_hops = encode_graph(encoder, x, seen).z
    encoder.cfg.num_layers = layers
    # float64; sums over a few dozen neighbours in another order.
    torch.testing.assert_close(z[seeds], two_hops[batch.gids[seeds]], rtol=0, atol=1e-10)

    edges = small_sbm.topology().edge_list()
    with torch.no_grad():
        whole = encoder(x, edges).z.flatten(1)
    embedded = embed_graph(encoder, x, small_sbm.topology())
    torch.testing.assert_close(embedded, whole.float(), rtol=0, atol=1e-6)
    assert float((whole - encode_graph(encoder, x, seen).z.flatten(1)).abs().max()) > 1e-4


def test_short_fan_outs_are_planned_and_trained(store_dir: Path, small_sbm: Graph) -> None:
    cfg = small_sbm_config(store_dir, *SHORT, "run.log_every=1")
    plan = make_plan(cfg)
    sink = MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    assert plan["steps"]["total_steps"] == trainer.total_steps == len(losses(sink))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert plan["model"]["parameters"] == parameters
    assert np.isfinite(losses(sink)).all()


def test_a_graph_in_memory_is_trained_like_its_store(tmp_path: Path) -> None:
    """The same nodes as a PyG Data and as files that are ingested: rows are scaled once each."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    edges = rng.integers(0, 150, (1500, 2))
    edges = edges[labels[edges[:, 0]] == labels[edges[:, 1]]]
    x = (rng.normal(size=(150, 24)) + 2 * labels[:, None]).astype(np.float32)
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, array in (("edges", edges), ("features", x), ("labels", labels)):
        np.save(folder / f"{name}.npy", array)
    where = [f"data.path={folder}", f"data.store_dir={tmp_path / 'stores'}"]
    cfg = load_config(overrides=["train.epochs=5"])
    stored = open_graph(load_config(overrides=["data.name=mine", *where]).data)
    data = Data(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(edges.T.copy()),
        y=torch.from_numpy(labels),
    )
    z = Pretrainer(cfg).fit(data).embed(data)
    other = Pretrainer(cfg).fit(stored).embed(stored)
    assert z.shape == (150, other.shape[1]) and torch.equal(z, other)


def test_saved_and_loaded_without_a_graph(small_sbm: Graph, tmp_path: Path) -> None:
    """The width of a factor is chosen by the features: what is loaded must choose it alike."""
    cfg = load_config(overrides=["train.epochs=3"])
    assert cfg.model.factor_dim == 0
    fitted = Pretrainer(cfg).fit(small_sbm)
    loaded = Pretrainer.load(fitted.save(tmp_path / "model"))
    assert loaded.cfg == fitted.config_
    assert torch.equal(loaded.embed(small_sbm), fitted.embed(small_sbm))
    sized = fitted.model_.encoder.cfg
    assert sized.factor_dim > 0 and loaded.model_.encoder.cfg == sized


@pytest.mark.parametrize(("features", "width"), [(3, 4), (100, 6), (500, 31), (2000, 32)])
def test_factors_are_as_wide_as_the_features_allow(features: int, width: int) -> None:
    sized = ModelConfig(num_factors=16, factor_dim=0).sized(features, 100, 400)
    assert sized.factor_dim == width
    assert ModelConfig(factor_dim=7).sized(features, 100, 400).factor_dim == 7


def test_more_epochs_take_up_the_longer_schedule(store_dir: Path, small_sbm: Graph) -> None:
    """A cosine that had ended continues where the longer one is at that step."""
    short, long = (small_sbm_config(store_dir, EDGES, f"train.epochs={n}") for n in (4, 8))
    assert short.optim.schedule == "cosine"
    sink = MemorySink()
    trainer = worker(short, Comm(), sink, small_sbm)
    tensors, meta = trainer.state()
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(short.optim.lr_min, abs=1e-12)

    from cimage_dist.io.checkpoint import Checkpoint

    fresh = Trainer(long, small_sbm, small_sbm.topology(), Comm())
    fresh.restore(Checkpoint(Path("memory"), trainer.step, tensors, meta))
    halfway = (long.optim.lr_max + long.optim.lr_min) / 2
    assert fresh.optimizer.param_groups[0]["lr"] == pytest.approx(halfway)
    edges = (long.optim.edge_lr + long.optim.lr_min) / 2
    assert fresh.scheduler.get_last_lr() == [pytest.approx(halfway), pytest.approx(edges)]


def test_the_first_labels_come_from_the_edge_loss_alone() -> None:
    """Whatever the weights are by default or by choice."""
    for loss in (Config().loss, LossConfig(structure_weight=0.0, redundancy_weight=3.0)):
        found = loss.edges_only()
        weights = (found.factor_weight, found.cluster_weight, found.redundancy_weight)
        assert found.structure_weight == 1 and weights == (0, 0, 0)


def test_updates_of_the_edge_factors_change_nothing_else(store_dir: Path, small_sbm: Graph) -> None:
    cfg = small_sbm_config(store_dir, EDGES, "optim.edge_steps=3")
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    trainer.model.train()
    own = {id(weight) for weight in trainer.model.edge_parameters()}
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    batches = list(trainer.batches.edge_batches(5))
    assert len(batches) == 2
    train_edges(trainer.model, trainer.optimizer, batches, 5, trainer.cfg, Comm())
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weight, before[name]) != (id(weight) in own), name


def test_edge_batches_are_a_function_of_the_step_and_differ(
    store_dir: Path, small_sbm: Graph
) -> None:
    cfg = small_sbm_config(store_dir, EDGES, "optim.edge_steps=3", "train.batch_edges=500")
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    first, again = (list(trainer.batches.edge_batches(5)) for _ in range(2))
    for one, two in zip(first, again, strict=True):
        assert torch.equal(one.pairs, two.pairs) and torch.equal(one.edges.src, two.edges.src)
        assert one.num_pos == one.global_pos == 500
        hidden = set(map(tuple, one.pairs[:500].tolist()))
        seen = set(zip(one.edges.src.tolist(), one.edges.dst.tolist(), strict=True))
        assert not hidden & seen
    drawn = [*first, *trainer.batches.edge_batches(6), trainer.batches.measuring_batch()]
    kinds = {tuple(map(tuple, batch.pairs.tolist())) for batch in drawn}
    assert len(kinds) == len(drawn) == 5


def test_edge_factors_train_alike_on_sparse_and_on_dense_features() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 120)
    edges = rng.integers(0, 120, (1500, 2))
    edges = edges[labels[edges[:, 0]] == labels[edges[:, 1]]]
    x = (rng.random((120, 90)) < 0.01 + 0.1 * (np.arange(90) % 3 == labels[:, None])) * 1.0
    x[:, 0] = 1  # no row is empty
    model = Pretrainer(load_config(overrides=[EDGES, "train.epochs=3", "optim.edge_steps=3"]))
    graphs = (Graph.from_edges(edges, x=rows) for rows in (x, scipy.sparse.csr_array(x)))
    dense, sparse = (model.fit(graph).embed(graph) for graph in graphs)
    # Single precision; a product with sparse rows adds in another order.
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-3)
