"""Sampled mini-batches against the full graph, what they may see and read, and exact resumption of
the whole objective.
"""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.data.ingest import open_graph
from cimage_dist.data.store import Graph
from cimage_dist.errors import Interrupted
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.nn.inference import encode_graph
from cimage_dist.nn.model import norm_kind
from cimage_dist.nn.projection import MomentsNorm
from cimage_dist.train import loop
from cimage_dist.train.loop import worker
from cimage_dist.train.progress import MEASURED
from cimage_dist.train.sink import LocalSink, MemorySink
from cimage_dist.train.step import SampledBatches
from cimage_dist.train.trainer import Trainer
from cimage_dist.types import Batch, EdgeList, Topology
from tests.procs import wait_for_children
from tests.settings import ROUTING, small_sbm_config

MODEL = [
    *ROUTING,
    "model.num_factors=4",
    "model.factor_dim=3",
    "model.num_layers=2",
    "model.routing_iterations=3",
]
WHOLE_OBJECTIVE = [
    *MODEL,
    "loss.factor_weight=0.7",
    "loss.cluster_weight=0.4",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=1",
    "cluster.restarts=2",
    "ci.every_steps=4",
    "ci.diagnose_every=1",
    "run.log_every=1",
    "run.checkpoint_every=3",
    "run.tensorboard=false",
]
FULL_GRAPH = [*WHOLE_OBJECTIVE, "train.epochs=10", "cluster.init_epochs=4"]
SAMPLED = [*WHOLE_OBJECTIVE, "train.epochs=1", "sampler.fanouts=[4,3,2]", "sampler.batch_edges=120"]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def without(topology: Topology, pairs: torch.Tensor) -> Topology:
    """The graph less the given edges, both directions."""
    n = topology.num_nodes
    rows, cols = topology.rows(), topology.indices.to(torch.int64)
    gone = torch.cat([pairs, pairs.flip(1)])
    keep = ~torch.isin(rows * n + cols, gone[:, 0] * n + gone[:, 1])
    counts = torch.bincount(rows[keep], minlength=n)
    return Topology(
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), topology.indices[keep]
    )


def seed_output(trainer: Trainer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Global ids, h and z of the seeds by the mini-batch encoder."""
    assert isinstance(trainer.batches, SampledBatches)
    step = trainer.batches.convert(batch, 0)
    with torch.no_grad():
        h, z, _ = trainer.model.encoder.eval()(step.x, step.edges)
    seeds = batch.pairs.unique()
    assert batch.gids is not None
    return batch.gids[seeds], h[seeds], z[seeds]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("grad", ["full", "last"])
def test_all_neighbours_of_the_receptive_field_give_the_full_graph_output(
    layers, grad, store_dir, small_sbm, double
):
    """Hops = routing layers + 1 for the tail; the batch's own edges are the only ones that both
    sides leave out.
    """
    fanouts = [-1] * (layers + 1)
    cfg = small_sbm_config(
        store_dir,
        *MODEL,
        f"model.num_layers={layers}",
        f"model.routing_grad={grad}",
        f"sampler.fanouts={fanouts}",
        "sampler.hide_rate=0",
    )
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert isinstance(trainer.batches, SampledBatches)
    batch = trainer.batches.source[0]
    gids, h, z = seed_output(trainer, batch)
    seen = without(small_sbm.topology(), batch.node_gids.view(-1, 2))
    whole = encode_graph(trainer.model.encoder, small_sbm.features().double(), seen)
    assert gids.numel() > 100
    # float64; sums over a few dozen neighbours in another order.
    torch.testing.assert_close(h, whole.h[gids], rtol=0, atol=1e-10)
    torch.testing.assert_close(z, whole.z[gids], rtol=0, atol=1e-10)


@pytest.mark.parametrize("fanouts", [[-1], [-1, -1], [-1, -1, 3]])
def test_a_smaller_field_does_not(fanouts, store_dir, small_sbm, double):
    """The guard of the test above: a missing hop, or a capped one, shows. Few seeds, so that their
    field is not the whole graph.
    """
    cfg = small_sbm_config(
        store_dir,
        *MODEL,
        f"sampler.fanouts={fanouts}",
        "sampler.hide_rate=0",
        "sampler.batch_edges=2",
    )
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert isinstance(trainer.batches, SampledBatches)
    batch = trainer.batches.source[0]
    gids, _, z = seed_output(trainer, batch)
    whole = encode_graph(
        trainer.model.encoder,
        small_sbm.features().double(),
        without(small_sbm.topology(), batch.node_gids.view(-1, 2)),
    )
    assert float((z - whole.z[gids]).abs().max()) > 1e-4


def test_no_message_follows_a_seed_edge_or_a_hidden_one(store_dir, small_sbm):
    cfg = small_sbm_config(
        store_dir,
        *MODEL,
        "sampler.fanouts=[-1,-1,-1]",
        "sampler.batch_edges=64",
        "sampler.hide_rate=0.3",
    )
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert isinstance(trainer.batches, SampledBatches)
    source, n = trainer.batches.source, small_sbm.num_nodes
    for step in range(trainer.batches.steps_per_epoch):
        batch = source[step]
        whole = source.schedule.batch(step)
        messages = batch.gids[torch.stack([batch.edges.src, batch.edges.dst], 1)].numpy()
        hidden = source.hidden(step, whole)
        assert not hidden.is_hidden(messages[:, 0], messages[:, 1]).any()
        keys = np.concatenate([whole.u * n + whole.v, whole.v * n + whole.u])
        assert not np.isin(messages[:, 0] * n + messages[:, 1], keys).any()
        assert batch.edges.src.numel() < 0.75 * small_sbm.num_edges  # 30 % are hidden


def test_moments_normalise_sampled_batches_by_default(store_dir, small_sbm):
    sampled, full = (
        small_sbm_config(store_dir, *MODEL, *more) for more in (["sampler.fanouts=[4,4]"], [])
    )
    assert (norm_kind(sampled), norm_kind(full)) == ("moments", "batch")
    assert isinstance(
        Trainer(sampled, small_sbm, small_sbm.topology(), Comm()).model.encoder.norm, MomentsNorm
    )
    assert isinstance(
        Trainer(full, small_sbm, small_sbm.topology(), Comm()).model.encoder.norm,
        torch.nn.BatchNorm1d,
    )


class CountedRows(np.ndarray):
    """An array that notes which rows are taken, and refuses to be read as a whole."""

    taken: list[np.ndarray]

    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, np.ndarray), f"features read by {index!r}"
        self.taken.append(index)
        return np.asarray(self).__getitem__(index)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_features_are_read_for_the_rows_of_a_batch_only(dtype, store_dir, monkeypatch):
    cfg = small_sbm_config(
        store_dir,
        *MODEL,
        "sampler.fanouts=[2,2]",
        "sampler.batch_edges=4",
        f"data.feature_dtype={dtype}",
    )
    graph = open_graph(cfg.data)
    assert isinstance(graph.x, np.memmap) and graph.x.dtype == dtype
    watched = graph.x.view(CountedRows)
    watched.taken = []
    monkeypatch.setattr(graph, "x", watched)
    monkeypatch.setattr(
        Graph, "features", lambda self: pytest.fail("the whole feature matrix was asked for")
    )
    trainer = Trainer(cfg, graph, graph.topology(), Comm())
    assert watched.taken == []
    batches = trainer.remaining()
    for step in range(3):
        batch = next(batches)[0]
        assert isinstance(trainer.batches, SampledBatches)
        read = watched.taken[-1]
        np.testing.assert_array_equal(read, trainer.batches.source[step].gids.numpy())
        assert batch.x.shape[0] == len(read) < graph.num_nodes and batch.x.dtype == torch.float32
        trainer.advance([batch])
    trainer.embedder(trainer.model.encoder, torch.tensor([3, 4]), 0)
    assert len(watched.taken) == 7 and len(watched.taken[-1]) < 30  # each batch was made twice here


def test_what_a_batch_reads_is_what_the_store_holds(store_dir, small_sbm):
    cfg = small_sbm_config(store_dir, *MODEL, "sampler.fanouts=[2,2]", "sampler.batch_edges=4")
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert isinstance(trainer.batches, SampledBatches)
    gids = trainer.batches.source[0].gids
    assert torch.equal(next(trainer.remaining())[0].x, small_sbm.features()[gids])


# ---- resumption of the three-term objective


class StopAfter(LocalSink):
    """Asks to stop as a signal would, after a given number of steps of the main training."""

    def __init__(self, *args: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = steps
        self.is_main_stage = False

    def tick(
        self, step: int, total: int, metrics: dict[str, float], stage: str = "pretrain"
    ) -> None:
        self.is_main_stage = stage == "pretrain"

    def stop_signal(self) -> int:
        self.left -= self.is_main_stage
        return 15 if self.is_main_stage and self.left == 0 else 0


def numbers(run: RunDir) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k not in MEASURED}
        for record in read_metrics(run.metrics)
    ]


def assert_same_run(left: Path, right: Path) -> None:
    a, b = (checkpoint.load_latest(path / "ckpt") for path in (left, right))
    assert a is not None and b is not None and a.meta == b.meta
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)
    assert numbers(RunDir(left)) == numbers(RunDir(right))


KINDS = {
    "full": FULL_GRAPH,
    "sampled": SAMPLED,
    "sampled, last, 2 loaders": [*SAMPLED, "model.routing_grad=last", "sampler.loader_processes=2"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_objective_resumes_to_the_last_bit(
    kind, store_dir, small_sbm, tmp_path, monkeypatch
):
    """Stopped at step 6, two steps into a refresh period of four: the partition must come from the
    checkpoint.
    """
    before = multiprocessing.active_children()  # of other tests of this process
    cfg = small_sbm_config(store_dir, *KINDS[kind])
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        whole = worker(cfg, Comm(), sink, small_sbm)
    assert whole.total_steps >= 10
    with (
        StopAfter(RunDir(tmp_path / "parts"), cfg.run, steps=6) as sink,
        pytest.raises(Interrupted),
    ):
        worker(cfg, Comm(), sink, small_sbm)
    saved = checkpoint.load_latest(tmp_path / "parts" / "ckpt")
    assert saved is not None and saved.step == 6
    assert saved.meta["scores"]["lam"] > 0 and saved.meta["scores"]["status"] == "ok"
    assert saved.tensors["scores.in_context"].dtype == torch.bool and saved.tensors[
        "scores.omega"
    ].shape == (12,)

    # Labels were stored by the first part: the second must not train an encoder for them again.
    monkeypatch.setattr(
        loop, "_edge_only", lambda *args: pytest.fail("initial labels were computed again")
    )
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        parts = worker(cfg, Comm(), sink, small_sbm)
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert [
        r["step"] for r in read_metrics(RunDir(tmp_path / "parts").metrics) if r["kind"] == "ci"
    ] == list(range(0, whole.total_steps, 4))
    wait_for_children(before)


def test_loader_processes_do_not_change_the_run(store_dir, small_sbm):
    losses = []
    for processes in (0, 2):
        sink = MemorySink()
        worker(
            small_sbm_config(store_dir, *SAMPLED, f"sampler.loader_processes={processes}"),
            Comm(),
            sink,
            small_sbm,
        )
        losses.append([r["loss"] for r in sink.records if r["kind"] == "train"])
    assert losses[0] == losses[1]


def test_a_killed_run_repeats_no_record(store_dir, small_sbm, tmp_path, monkeypatch):
    """Killed just after the refresh that follows a checkpoint: its record is in the file, and the
    refresh runs again.
    """
    cfg = small_sbm_config(store_dir, *FULL_GRAPH, "run.checkpoint_every=4")
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
    advance = Trainer.advance

    def killed(self: Trainer, batch: Any) -> Any:
        if self.step == 4 and self.scores is not None:
            raise SystemExit("killed")
        return advance(self, batch)

    monkeypatch.setattr(Trainer, "advance", killed)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink, pytest.raises(SystemExit):
        worker(cfg, Comm(), sink, small_sbm)
    assert (
        numbers(RunDir(tmp_path / "parts"))[-1]["kind"] == "ci"
        and numbers(RunDir(tmp_path / "parts"))[-1]["step"] == 4
    )
    monkeypatch.setattr(Trainer, "advance", advance)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.fixture(scope="module")
def whole_run(store_dir, small_sbm, tmp_path_factory) -> Path:
    cfg = small_sbm_config(store_dir, *FULL_GRAPH)
    path = tmp_path_factory.mktemp("runs") / "whole"
    with LocalSink(RunDir(path), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
    return path


@pytest.mark.parametrize("damage", ["tensors.safetensors", "manifest.json", "absent"])
def test_damaged_labels_are_computed_again_and_alike(
    damage, whole_run, store_dir, small_sbm, tmp_path
):
    cfg = small_sbm_config(store_dir, *FULL_GRAPH)
    with StopAfter(RunDir(tmp_path), cfg.run, steps=6) as sink, pytest.raises(Interrupted):
        worker(cfg, Comm(), sink, small_sbm)
    folder = tmp_path / "pseudo-labels"
    if damage == "absent":
        shutil.rmtree(folder)
    else:
        (folder / damage).write_bytes((folder / damage).read_bytes()[:-20])
    with LocalSink(RunDir(tmp_path), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
        assert sink.fetch("pseudo-labels") is not None
    assert_same_run(whole_run, tmp_path)


def test_an_interrupted_search_for_labels_starts_again(store_dir, small_sbm, tmp_path):
    """A signal during the edge-only training: nothing is stored, and the next start gives the same
    run.
    """

    class StopAtOnce(LocalSink):
        def stop_signal(self) -> int:
            return 15

    shutil.rmtree(store_dir / "labels", ignore_errors=True)  # or they would be found there
    cfg = small_sbm_config(store_dir, *FULL_GRAPH)
    with StopAtOnce(RunDir(tmp_path), cfg.run) as sink, pytest.raises(Interrupted) as stop:
        worker(cfg, Comm(), sink, small_sbm)
    assert stop.value.step == 0 and not (tmp_path / "pseudo-labels").exists()
    with LocalSink(RunDir(tmp_path), cfg.run) as sink:
        assert worker(cfg, Comm(), sink, small_sbm).step == 10


def test_edges_out_of_order_are_routed_like_sorted_ones(store_dir, small_sbm):
    """The compiled routing loop wants messages sorted by target; others are sorted first."""
    cfg = small_sbm_config(store_dir, *MODEL, "model.routing_grad=last")
    encoder = Trainer(cfg, small_sbm, small_sbm.topology(), Comm()).model.encoder.eval()
    edges = small_sbm.topology().edge_list()
    order = torch.randperm(edges.src.numel(), generator=torch.Generator().manual_seed(0))
    mixed = EdgeList(edges.src[order], edges.dst[order], edges.num_nodes)
    with torch.no_grad():
        a, b = encoder(small_sbm.features(), edges).z, encoder(small_sbm.features(), mixed).z
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # float32
