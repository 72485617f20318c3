"""The refresh inside training: its schedule, what it looks at, and what happens when the embeddings
are of no use.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.data.ingest import open_graph
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.nn.encoder import Encoder, Encoding
from cimage_dist.train import loop, refresh
from cimage_dist.train.loop import worker
from cimage_dist.train.refresh import Refresher, random_scores
from cimage_dist.train.sink import LocalSink, MemorySink
from cimage_dist.train.trainer import Trainer
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
        self.h[:, :2] += (
            3 * torch.randn(int(labels.max()) + 1, 2, width, generator=generator)[labels]
        )
        self.asked: list[torch.Tensor] = []

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        self.asked.append(gids)
        return Encoding(self.h[gids], self.h[gids])


def made(cfg: Config, n: int = 3000, clusters: int = 3) -> tuple[Refresher, FixedEmbedder]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, clusters, (n,), generator=generator)
    embedder = FixedEmbedder(labels)
    return Refresher(
        cfg,
        labels,
        torch.rand(n, generator=generator, dtype=torch.float64),
        embedder,
        Comm(),
        num_steps=1000,
    ), embedder


def test_refreshes_and_diagnostics_follow_the_schedule_in_steps(store_dir, small_sbm):
    sink = MemorySink()
    trainer = worker(config(store_dir), Comm(), sink, small_sbm)
    found = [r for r in sink.records if r["kind"] == "ci"]
    assert [r["step"] for r in found] == [0, 4, 8]
    assert all(
        "hsic_given_labels" in r for r in found
    )  # of every second refresh by the config, but the run is short
    for record in found:
        assert record["status"] == "ok" and 0 < len(record["context"]) < 4
        assert [k for k, s in enumerate(record["scores"]) if s > 0] == record["context"]
        assert record["confident"] >= 45 and {f"mu_norm/{c}" for c in range(3)} <= record.keys()
    for name in (
        "f1_size",
        "jaccard_permutations",
        "jaccard_permutations_chance",
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
    assert "jaccard_previous" not in found[0]
    for old, new in pairwise(found):
        a, b = set(old["context"]), set(new["context"])
        assert new["jaccard_previous"] == len(a & b) / len(a | b)
        assert 0 < new["jaccard_previous_chance"] < 1
    json.dumps(found, allow_nan=False)  # finite, and plain enough for metrics.jsonl
    assert (
        trainer.scores is not None
        and trainer.scores.in_context.nonzero().squeeze(-1).tolist() == found[-1]["context"]
    )


def test_the_random_control_computes_no_labels_and_never_changes(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(loop, "initial_labels", lambda *args: pytest.fail("labels were computed"))
    cfg = config(store_dir, "ci.partition=random")
    sink = MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    assert not [r for r in sink.records if r["kind"] == "ci"] and sink.stored == {}
    assert trainer.scores is not None and torch.equal(
        trainer.scores.in_context, random_scores(4, cfg.run.seed).in_context
    )
    assert int(trainer.scores.in_context.sum()) == 2
    assert sink.records[-1]["factor"] > 0


def test_the_redrawn_control_needs_no_labels(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(loop, "initial_labels", lambda *args: pytest.fail("labels were computed"))
    cfg = config(store_dir, "ci.partition=random_redrawn", "model.num_factors=10")
    sink, twin = MemorySink(), MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    found = [r for r in sink.records if r["kind"] == "ci"]
    assert [r["step"] for r in found] == [0, 4, 8] and sink.stored == {}
    assert all(len(r["context"]) == 5 and r["status"] == "random-half" for r in found)
    assert len({tuple(r["context"]) for r in found}) == 3 and "jaccard_previous" in found[1]
    assert trainer.scores is not None
    assert trainer.scores.in_context.nonzero().squeeze(-1).tolist() == found[-1]["context"]
    worker(cfg, Comm(), twin, small_sbm)
    again = [r for r in twin.records if r["kind"] == "ci"]
    assert again == found


def test_no_factor_weight_no_labels(store_dir, small_sbm, monkeypatch):
    monkeypatch.setattr(loop, "initial_labels", lambda *args: pytest.fail("labels were computed"))
    sink = MemorySink()
    trainer = worker(
        config(store_dir, "loss.factor_weight=0", "loss.cluster_weight=0.4"),
        Comm(),
        sink,
        small_sbm,
    )
    assert (
        trainer.scores is None
        and trainer.model.factors is None
        and "factor" not in sink.records[-1]
    )


def test_label_driven_factors_are_found_and_the_penalty_is_reused(store_dir):
    refresher, _ = made(config(store_dir))
    encoder = object()
    scores, first = refresher(encoder, 0, None)
    again, second = refresher(encoder, 4, scores)
    assert first["context"] == second["context"] == [0, 1]
    assert again.lam == scores.lam and again.num_solves == 1  # the warm start hits at once


class Poisoned(FixedEmbedder):
    """Puts a NaN or an infinity into chosen steps."""

    bad: dict[int, float]

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        h, z, _ = super().__call__(encoder, gids, step)
        if step in self.bad:
            h = h.clone()
            h[7, 0, 0] = self.bad[step]
        return Encoding(h, z)


def poisoned(cfg: Config, bad: dict[int, float]) -> Refresher:
    refresher, embedder = made(cfg)
    embedder.__class__ = Poisoned
    embedder.bad = bad
    return refresher


def test_embeddings_that_are_not_finite_keep_the_partition_and_are_counted(store_dir):
    refresher = poisoned(config(store_dir), {4: np.nan, 8: np.inf, 16: np.nan})
    encoder: Any = None
    good, _ = refresher(encoder, 0, None)
    one, log_one = refresher(encoder, 4, good)
    two, log_two = refresher(encoder, 8, one)
    assert (log_one["status"], log_one["failures"], log_two["failures"]) == (
        "skipped-nonfinite",
        1,
        2,
    )
    assert (
        torch.equal(two.in_context, good.in_context) and two.lam == good.lam
    )  # the warm start survives
    json.dumps([log_one, log_two], allow_nan=False)
    fine, log_fine = refresher(encoder, 12, two)
    assert fine.status == "ok" and refresher.failures == 0 and log_fine["status"] == "ok"
    refresher(encoder, 16, fine)
    assert refresher.failures == 1


def test_three_failures_in_a_row_end_the_run_with_a_reason(store_dir):
    refresher = poisoned(config(store_dir), {0: np.nan, 4: np.nan, 8: np.nan})
    encoder: Any = None
    scores, _ = refresher(encoder, 0, None)
    assert (
        int(scores.in_context.sum()) == 2 and scores.status == "skipped-nonfinite"
    )  # first call: a random half
    scores, _ = refresher(encoder, 4, scores)
    with pytest.raises(
        UserError, match=r"3 times in a row.*NaN or infinite at step 8.*optim\.lr_max"
    ):
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
    assert fresh.scores is not None and torch.equal(
        fresh.scores.in_context, saved.tensors["scores.in_context"]
    )


def test_the_sampled_regime_looks_at_no_more_than_the_limit(store_dir):
    """At most max_samples members and as many candidates are embedded, and at most max_samples of
    the grown set are scored.
    """
    cfg = config(
        store_dir, "sampler.fanouts=[2,2]", "ci.max_samples=200", "cluster.growth_threshold=-1"
    )
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
        _, record = refresher(None, 0, None)
    assert embedder.asked[0].numel() == 400 and set(scored) == {200}
    assert (
        record["grown"] == 200 and record["confident"] == 400
    )  # threshold -1: every candidate joins


def test_the_full_graph_regime_looks_at_every_node_and_scores_within_the_limit(store_dir):
    cfg = config(store_dir, "ci.max_samples=100")
    refresher, embedder = made(cfg)
    refresher(None, 0, None)
    assert embedder.asked[0].numel() == 3000


def test_unlabelled_nodes_are_neither_members_nor_candidates(store_dir):
    cfg = config(store_dir, "sampler.fanouts=[2,2]", "cluster.growth_threshold=-1")
    labels = torch.tensor([0, 1] * 300 + [-1] * 400)
    embedder = FixedEmbedder(labels.clamp(min=0))
    refresher = Refresher(
        cfg, labels, torch.rand(1000, dtype=torch.float64), embedder, Comm(), num_steps=1000
    )
    _, record = refresher(None, 0, None)
    assert int(embedder.asked[0].max()) < 600 and record["confident"] == 600


@pytest.mark.parametrize(
    "extra",
    [
        ["ci.features=factor_mean"],
        ["ci.solver=nnlasso", "ci.conditional=stratified"],
        ["ci.lam=1e-4"],
        ["ci.block_classes=2"],
        ["ci.target=1"],
    ],
)
def test_every_way_of_scoring_runs_inside_a_refresh(extra, store_dir):
    refresher, _ = made(config(store_dir, *extra))
    scores, record = refresher(None, 0, None)
    assert 0 < int(scores.in_context.sum()) < 4 and record["status"] in ("ok", "fallback-smallest")
    if extra != ["ci.lam=1e-4"]:
        assert set(record["context"]) & {0, 1}


def embeddings_between_steps(comm: Comm, store_dir: Path) -> np.ndarray:
    """What the ranks would give a refresh after two steps; dropout differs between ranks."""
    torch.set_num_threads(1)
    cfg = config(store_dir, "model.dropout=0.5", "loss.factor_weight=0")
    graph = open_graph(cfg.data)
    trainer = Trainer(cfg, graph, graph.topology(), comm)
    batches = trainer.remaining()
    for _ in range(2):
        trainer.advance(next(batches))
    trainer.settle()
    return trainer.embedder(trainer.model.encoder, torch.arange(graph.num_nodes), 2).h.numpy()


def test_ranks_embed_alike_between_steps(store_dir, small_sbm):
    first, second = run_ranks(embeddings_between_steps, 2, store_dir)
    np.testing.assert_array_equal(first, second)


class Scaled(FixedEmbedder):
    """Every node's factors times a number of its own, as a sum over its neighbours would be."""

    def __call__(self, encoder: Encoder, gids: torch.Tensor, step: int) -> Encoding:
        h, z, _ = super().__call__(encoder, gids, step)
        return Encoding(h * (1 + gids % 50).view(-1, 1, 1), z)


def test_unit_factors_do_not_depend_on_the_length_of_rows(store_dir):
    scores: dict[tuple[str, bool], torch.Tensor] = {}
    for normalize in ("true", "false"):
        for is_scaled in (False, True):
            refresher, embedder = made(config(store_dir, f"ci.normalize={normalize}"))
            if is_scaled:
                embedder.__class__ = Scaled
            encoder: Any = None
            scores[normalize, is_scaled] = refresher(encoder, 0, None)[0].scores
    torch.testing.assert_close(scores["true", True], scores["true", False], rtol=0, atol=1e-3)
    assert not torch.allclose(scores["false", True], scores["false", False], rtol=0, atol=1e-3)


def test_only_refreshes_that_decide_enter_the_average(store_dir, monkeypatch):
    refresher = poisoned(config(store_dir), {8: np.nan})
    encoder: Any = None
    scores, _ = refresher(encoder, 0, None)
    first = refresher.average
    assert first is not None and first.weight == 1.0
    scores, _ = refresher(encoder, 4, scores)
    second = refresher.average
    assert second is not None and second.weight == 1.5 and not torch.equal(second.G, first.G)
    scores, record = refresher(encoder, 8, scores)
    assert record["status"] == "skipped-nonfinite" and refresher.average is second
    original = refresh.block_statistics

    def one_class(*args: Any, **options: Any) -> Any:
        return replace(original(*args, **options), num_classes=1)

    monkeypatch.setattr(refresh, "block_statistics", one_class)
    scores, record = refresher(encoder, 12, scores)
    assert record["status"] == "kept-previous" and refresher.average is second


def test_without_an_average_refreshes_stand_alone(store_dir):
    alone, _ = made(config(store_dir, "ci.average=0"))
    scores, _ = alone(None, 0, None)
    later, _ = alone(None, 4, scores)
    fresh, _ = made(config(store_dir, "ci.average=0"))
    assert alone.average is None
    assert torch.equal(later.omega, fresh(None, 4, scores)[0].omega)


class StopAfter(LocalSink):
    """Receives a signal after some steps."""

    left = 6

    def stop_signal(self) -> int:
        self.left -= 1
        return 15 if self.left == 0 else 0


@pytest.mark.parametrize("partition", ["ci", "random_redrawn"])
def test_resumed_refreshes_are_bit_exact(partition, store_dir, small_sbm, tmp_path):
    """Stopped between two refreshes: average, partition and moments come from the checkpoint."""
    cfg = config(store_dir, f"ci.partition={partition}", "ci.average=0.8", "model.dropout=0.3")
    cfg.cluster.init = "propagated"
    for name in ("whole", "parts"):
        if name == "parts":
            with StopAfter(RunDir(tmp_path / name), cfg.run) as sink, pytest.raises(Interrupted):
                worker(cfg, Comm(), sink, small_sbm)
        with LocalSink(RunDir(tmp_path / name), cfg.run) as sink:
            worker(cfg, Comm(), sink, small_sbm)
    a, b = (checkpoint.load_latest(tmp_path / name / "ckpt") for name in ("whole", "parts"))
    assert a is not None and b is not None and a.step == b.step == 11 and a.meta == b.meta
    assert ("average.G" in a.tensors) == (partition == "ci")
    if partition == "ci":
        assert a.meta["average"]["weight"] == pytest.approx(1 + 0.8 + 0.64)
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)


SAMPLED = ["sampler.fanouts=[3,3]", "model.norm=batch", "train.epochs=1"]


@pytest.mark.parametrize("extra", [[], SAMPLED], ids=["full", "sampled"])
def test_stored_moments_are_those_of_the_clean_features(extra, store_dir, small_sbm):
    """Whatever dropout did in training; a refresh and validation see them too."""
    norm = ["model.init=random", "model.dropout=0.8"]
    cfg = config(store_dir, *norm, "train.validate_every=5", *extra)
    seen: list[torch.Tensor] = []
    clean = small_sbm.features()

    def moments_of(model: Any) -> dict[str, float]:
        y = model.encoder.linear(clean)
        torch.testing.assert_close(model.encoder.norm.running_mean, y.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.encoder.norm.running_var, y.var(0), rtol=1e-4, atol=1e-5)
        seen.append(y)
        return {"score": float(y.detach().sum())}

    trainer = worker(cfg, Comm(), MemorySink(), small_sbm, moments_of)
    moments_of(trainer.model)
    trainer.advance(next(iter(Trainer(cfg, small_sbm, small_sbm.topology(), Comm()).remaining())))
    trainer.settle()
    moments_of(trainer.model)
    assert len(seen) >= 3
