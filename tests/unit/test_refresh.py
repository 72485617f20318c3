"""The refresh inside training: its schedule, what it looks at, and what happens when the embeddings are of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist import checkpoint
from cimage_dist.artifacts import RunDir
from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.errors import UserError
from cimage_dist.graph.ingest import open_graph
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.train import loop, refresh
from cimage_dist.train.loop import Trainer, worker
from cimage_dist.train.refresh import Refresher, random_scores
from cimage_dist.train.sink import LocalSink, MemorySink
from tests.procs import run_ranks
from tests.settings import small_sbm_config

TINY = [
    "model.num_factors=4",
    "model.factor_dim=3",
    "model.num_layers=1",
    "model.routing_iterations=2",
    "loss.factor_weight=0.7",
    "cluster.init=selfkmeans",
    "cluster.init_epochs=2",
    "cluster.restarts=2",
    "train.epochs=11",
    "ci.every_steps=4",
    "ci.diagnose_every=2",
    "run.log_every=100",
    "run.tensorboard=false",
]


def config(store_dir: Path, *overrides: str) -> Config:
    return small_sbm_config(store_dir, *TINY, *overrides)


class FixedEmbedder:
    """Label-driven factors 0 and 1, noise in the others; the rows asked for are noted."""

    def __init__(self, labels: torch.Tensor, num_factors: int = 4, width: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        self.h = torch.randn(len(labels), num_factors, width, generator=generator)
        self.h[:, :2] += 3 * torch.randn(int(labels.max()) + 1, 2, width, generator=generator)[labels]
        self.asked: list[torch.Tensor] = []

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        self.asked.append(gids)
        return Encoding(self.h[gids], self.h[gids])


def made(cfg: Config, n: int = 3000, clusters: int = 3) -> tuple[Refresher, FixedEmbedder]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, clusters, (n,), generator=generator)
    embedder = FixedEmbedder(labels)
    return Refresher(cfg, labels, torch.rand(n, generator=generator, dtype=torch.float64), embedder, Comm(), num_steps=1000), embedder


def test_refreshes_and_diagnostics_follow_the_schedule_in_steps(store_dir, small_sbm):
    sink = MemorySink()
    trainer = worker(config(store_dir), Comm(), sink, small_sbm)
    found = [r for r in sink.records if r["kind"] == "ci"]
    assert [r["step"] for r in found] == [0, 4, 8]
    assert all("hsic_given_labels" in r for r in found)  # of every second refresh by the config, but the run is short
    for record in found:
        assert record["status"] == "ok" and 0 < len(record["context"]) < 4
        assert [k for k, s in enumerate(record["scores"]) if s > 0] == record["context"]
        assert record["confident"] >= 45 and {f"mu_norm/{c}" for c in range(3)} <= record.keys()
    for name in (
        "f1_size",
        "jaccard",
        "lam",
        "sigma2",
        "variance/3",
        "variance_f2_min",
        "hsic_random",
        "rank_f2",
        "accuracy_f1",
        "accuracy_f2",
        "accuracy_both",
    ):
        assert name in found[0]
    json.dumps(found, allow_nan=False)  # finite, and plain enough for metrics.jsonl
    assert trainer.scores is not None and trainer.scores.in_context.nonzero().squeeze(-1).tolist() == found[-1]["context"]


def test_the_random_control_computes_no_labels_and_never_changes(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(loop, "initial_labels", lambda *args: pytest.fail("labels were computed"))
    cfg = config(store_dir, "ci.partition=random")
    sink = MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    assert not [r for r in sink.records if r["kind"] == "ci"] and sink.stored == {}
    assert trainer.scores is not None and torch.equal(trainer.scores.in_context, random_scores(4, cfg.run.seed).in_context)
    assert int(trainer.scores.in_context.sum()) == 2
    assert sink.records[-1]["factor"] > 0


def test_no_factor_weight_no_labels(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(loop, "initial_labels", lambda *args: pytest.fail("labels were computed"))
    sink = MemorySink()
    trainer = worker(config(store_dir, "loss.factor_weight=0", "loss.cluster_weight=0.4"), Comm(), sink, small_sbm)
    assert trainer.scores is None and trainer.model.factors is None and "factor" not in sink.records[-1]


def test_label_driven_factors_are_found_and_the_penalty_is_reused(store_dir):
    refresher, _ = made(config(store_dir))
    encoder = object()
    scores, first = refresher(encoder, 0, None)  # type: ignore[arg-type]
    again, second = refresher(encoder, 4, scores)  # type: ignore[arg-type]
    assert first["context"] == second["context"] == [0, 1]
    assert again.lam == scores.lam and again.num_solves == 1  # the warm start hits at once


class Poisoned(FixedEmbedder):
    """Puts a NaN or an infinity into chosen steps."""

    bad: dict[int, float]

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        h, z = super().__call__(encoder, gids, step)
        if step in self.bad:
            h = h.clone()
            h[7, 0, 0] = self.bad[step]
        return Encoding(h, z)


def poisoned(cfg: Config, bad: dict[int, float]) -> Refresher:
    refresher, embedder = made(cfg)
    embedder.__class__ = Poisoned
    embedder.bad = bad  # type: ignore[attr-defined]
    return refresher


def test_embeddings_that_are_not_finite_keep_the_partition_and_are_counted(store_dir):
    refresher = poisoned(config(store_dir), {4: np.nan, 8: np.inf, 16: np.nan})
    encoder: Any = None
    good, _ = refresher(encoder, 0, None)
    one, log_one = refresher(encoder, 4, good)
    two, log_two = refresher(encoder, 8, one)
    assert (log_one["status"], log_one["failures"], log_two["failures"]) == ("skipped-nonfinite", 1, 2)
    assert torch.equal(two.in_context, good.in_context) and two.lam == good.lam  # the warm start survives
    json.dumps([log_one, log_two], allow_nan=False)
    fine, log_fine = refresher(encoder, 12, two)
    assert fine.status == "ok" and refresher.failures == 0 and log_fine["status"] == "ok"
    refresher(encoder, 16, fine)
    assert refresher.failures == 1


def test_three_failures_in_a_row_end_the_run_with_a_reason(store_dir):
    refresher = poisoned(config(store_dir), {0: np.nan, 4: np.nan, 8: np.nan})
    encoder: Any = None
    scores, _ = refresher(encoder, 0, None)
    assert int(scores.in_context.sum()) == 2 and scores.status == "skipped-nonfinite"  # first call: a random half
    scores, _ = refresher(encoder, 4, scores)
    with pytest.raises(UserError, match=r"3 times in a row.*NaN or infinite at step 8.*optim\.lr_max"):
        refresher(encoder, 8, scores)


def test_the_counter_of_failures_is_in_the_checkpoint(store_dir, small_sbm, tmp_path, monkeypatch):
    cfg = config(store_dir, "train.epochs=6", "run.checkpoint_every=6")
    with LocalSink(RunDir(tmp_path), cfg.run) as sink:
        trainer = worker(cfg, Comm(), sink, small_sbm)
        assert trainer.refresher is not None
        trainer.refresher.failures = 2
        sink.save(6, *trainer.state(), is_best=False)
    saved = checkpoint.load_latest(tmp_path / "ckpt")
    assert saved is not None and saved.meta["refresh_failures"] == 2
    fresh = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    fresh.refresher = made(cfg)[0]
    fresh.restore(saved)
    assert fresh.refresher.failures == 2
    assert fresh.scores is not None and torch.equal(fresh.scores.in_context, saved.tensors["scores.in_context"])


def test_the_sampled_regime_looks_at_no_more_than_the_limit(store_dir):
    """At most max_samples members and as many candidates are embedded, and at most max_samples of the grown set are scored."""
    cfg = config(store_dir, "sampler.fanouts=[2,2]", "ci.max_samples=200", "cluster.growth_threshold=-1")
    refresher, embedder = made(cfg)
    assert int(refresher.base.sum()) == 200 and int((~refresher.base).sum()) == 200
    counts = torch.bincount(refresher.labels[refresher.base]).tolist()
    assert max(counts) - min(counts) <= 1  # even over clusters
    scored: list[int] = []
    original = refresh.block_statistics

    def spy(features: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scored.append(features.shape[0])
        return original(features, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh, "block_statistics", spy)
        _, record = refresher(None, 0, None)  # type: ignore[arg-type]
    assert embedder.asked[0].numel() == 400 and scored == [200]
    assert record["grown"] == 200 and record["confident"] == 400  # threshold -1: every candidate joins


def test_the_full_graph_regime_looks_at_every_node_and_scores_within_the_limit(store_dir):
    cfg = config(store_dir, "ci.max_samples=100")
    refresher, embedder = made(cfg)
    refresher(None, 0, None)  # type: ignore[arg-type]
    assert embedder.asked[0].numel() == 3000


def test_unlabelled_nodes_are_neither_members_nor_candidates(store_dir):
    cfg = config(store_dir, "sampler.fanouts=[2,2]", "cluster.growth_threshold=-1")
    labels = torch.tensor([0, 1] * 300 + [-1] * 400)
    embedder = FixedEmbedder(labels.clamp(min=0))
    refresher = Refresher(cfg, labels, torch.rand(1000, dtype=torch.float64), embedder, Comm(), num_steps=1000)
    _, record = refresher(None, 0, None)  # type: ignore[arg-type]
    assert int(embedder.asked[0].max()) < 600 and record["confident"] == 600


@pytest.mark.parametrize(
    "extra", [["ci.features=factor_mean"], ["ci.solver=nnlasso", "ci.conditional=stratified"], ["ci.lam=1e-4"], ["ci.block_classes=2"], ["ci.target=1"]]
)
def test_every_way_of_scoring_runs_inside_a_refresh(extra, store_dir):
    refresher, _ = made(config(store_dir, *extra))
    scores, record = refresher(None, 0, None)  # type: ignore[arg-type]
    assert 0 < int(scores.in_context.sum()) < 4 and record["status"] in ("ok", "fallback-smallest")
    if extra != ["ci.lam=1e-4"]:
        assert set(record["context"]) & {0, 1}


def embeddings_between_steps(comm: Comm, store_dir: Path) -> np.ndarray:
    """What the ranks would give a refresh after two steps with dropout: batch normalisation has seen other rows on every rank."""
    torch.set_num_threads(1)
    cfg = config(store_dir, "model.dropout=0.5", "loss.factor_weight=0")
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    batches = trainer.remaining()
    for _ in range(2):
        trainer.advance(next(batches))
    return trainer.embedder(trainer.model.encoder, torch.arange(graph.num_nodes), 2).h.numpy()


def test_ranks_embed_alike_between_steps(store_dir, small_sbm):
    first, second = run_ranks(embeddings_between_steps, 2, store_dir)
    np.testing.assert_array_equal(first, second)
