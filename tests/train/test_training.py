from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import Config
from cimage_dist.config_loading import load_config
from cimage_dist.data.splits import training_graph
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir, read_metrics
from cimage_dist.pipeline import stages
from cimage_dist.sampling.hidden import edge_keys, is_edge
from cimage_dist.train.loop import worker
from cimage_dist.train.progress import MEASURED, Progress
from cimage_dist.train.sink import LocalSink, MemorySink
from cimage_dist.train.step import FullGraphBatches
from tests.conftest import small_sbm_settings
from tests.settings import ROUTING

TINY = [
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=2",
    "train.epochs=8",
    "run.log_every=1",
    "run.checkpoint_every=2",
    "loss.factor_weight=0",
]


@pytest.fixture
def cfg(store_dir) -> Config:
    return load_config(overrides=[*small_sbm_settings(store_dir), *TINY])


class StopAfter(LocalSink):
    """Asks to stop as a signal would, after a given number of steps."""

    def __init__(self, *args: Any, steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = steps

    def stop_signal(self) -> int:
        self.left -= 1
        return 15 if self.left == 0 else 0


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def weight_sum(model: Any) -> dict[str, float]:
    """A stand-in for a validation score."""
    return {"score": model.encoder.linear.weight.sum().item()}


def numbers(run: RunDir) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in record.items() if k not in MEASURED}
        for record in read_metrics(run.metrics)
    ]


def test_the_loss_falls(store_dir, small_sbm):
    settings = [*small_sbm_settings(store_dir), *ROUTING, *TINY, "train.epochs=40"]
    cfg = load_config(overrides=settings)
    sink = MemorySink()
    worker(cfg, Comm(), sink, small_sbm)
    losses = [r["loss"] for r in sink.records if r["kind"] == "train"]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])


VIEWS = ["loss.redundancy_weight=0.5", "mask.hide_rate=0.3", "mask.feature_rate=0.2"]
FACTORS = ["loss.factor_weight=0.4", "ci.partition=random"]


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_two_views_resume_to_the_last_bit(store_dir, small_sbm, tmp_path, kind):
    sampled = (
        ["sampler.fanouts=[4,4,4]", "sampler.batch_edges=150", "train.epochs=1"]
        if kind == "sampled"
        else []
    )
    cfg = load_config(overrides=[*small_sbm_settings(store_dir), *TINY, *VIEWS, *FACTORS, *sampled])
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
    with (
        StopAfter(RunDir(tmp_path / "parts"), cfg.run, steps=3) as sink,
        pytest.raises(Interrupted),
    ):
        worker(cfg, Comm(), sink, small_sbm)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        trainer = worker(cfg, Comm(), sink, small_sbm)
    assert trainer.step > 4
    assert numbers(RunDir(tmp_path / "parts")) == numbers(RunDir(tmp_path / "whole"))
    assert all(
        "redundancy" in r for r in numbers(RunDir(tmp_path / "whole")) if r["kind"] == "train"
    )
    a, b = (checkpoint.load_latest(tmp_path / name / "ckpt") for name in ("whole", "parts"))
    assert a is not None and b is not None and a.meta == b.meta
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)


def test_views_of_a_step_are_independent_and_hide_whole_edges(store_dir, small_sbm):
    cfg = load_config(overrides=[*small_sbm_settings(store_dir), *TINY, *VIEWS])
    topology, x = small_sbm.topology(), small_sbm.features()
    batches = FullGraphBatches(x, topology, cfg, Comm())
    first, again = batches.batch(3), FullGraphBatches(x, topology, cfg, Comm()).batch(3)
    assert first.second is not None and again.second is not None
    keys = []
    for view, same in ((first, again), (first.second, again.second)):
        assert torch.equal(view.edges.src, same.edges.src) and torch.equal(view.x, same.x)
        key = view.edges.dst * topology.num_nodes + view.edges.src
        assert torch.equal(
            key.sort().values, (view.edges.src * topology.num_nodes + view.edges.dst).sort().values
        )
        keys.append(key)
        gone = (view.x == 0).all(0)
        assert torch.equal(view.x[:, ~gone], x[:, ~gone])
    seen = batches.masker.mask(3).visible.src.numel()
    assert 0.6 < keys[0].numel() / seen < 0.8
    assert not torch.equal(first.x, first.second.x) and not torch.equal(*(key[:50] for key in keys))
    later = batches.batch(4).second
    assert later is not None and not torch.equal(later.edges.src[:50], first.second.edges.src[:50])


def test_redundancy_alone_trains_without_an_edge_decoder(store_dir, small_sbm):
    overrides = [
        *small_sbm_settings(store_dir),
        *TINY,
        *VIEWS,
        "loss.structure_weight=0",
        "loss.cluster_weight=0",
        "train.epochs=30",
    ]
    cfg = load_config(overrides=overrides)
    sink = MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    assert trainer.model.structure is None
    records = [r for r in sink.records if r["kind"] == "train"]
    assert all(
        "structure" not in r and r["loss"] == pytest.approx(0.5 * r["redundancy"]) for r in records
    )
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize("stop_at", [1, 3, 4, 7])
def test_resumed_equals_uninterrupted_to_the_last_bit(cfg, small_sbm, tmp_path, stop_at):
    cfg.train.validate_every, cfg.train.select = 3, "val"
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        whole = worker(cfg, Comm(), sink, small_sbm, weight_sum)
    with (
        StopAfter(RunDir(tmp_path / "parts"), cfg.run, steps=stop_at) as sink,
        pytest.raises(Interrupted),
    ):
        worker(cfg, Comm(), sink, small_sbm, weight_sum)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        parts = worker(cfg, Comm(), sink, small_sbm, weight_sum)
    torch.testing.assert_close(weights(parts.model), weights(whole.model), rtol=0, atol=0)
    assert (parts.best_score, parts.best_step) == (whole.best_score, whole.best_step)
    assert numbers(RunDir(tmp_path / "parts")) == numbers(RunDir(tmp_path / "whole"))
    a, b = (checkpoint.load_latest(tmp_path / name / "ckpt") for name in ("whole", "parts"))
    assert a is not None and b is not None and a.meta == b.meta
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)


def test_a_run_goes_on_from_the_last_whole_checkpoint(cfg, small_sbm, tmp_path, caplog):
    with StopAfter(RunDir(tmp_path), cfg.run, steps=5) as sink, pytest.raises(Interrupted):
        worker(cfg, Comm(), sink, small_sbm)
    newest = tmp_path / "ckpt" / "step-00000005" / checkpoint.TENSORS
    newest.write_bytes(newest.read_bytes()[:100])
    with LocalSink(RunDir(tmp_path), cfg.run) as sink:
        trainer = worker(cfg, Comm(), sink, small_sbm)
    assert trainer.step == 8 and "truncated" in caplog.text
    assert [
        r["step"] for r in read_metrics(RunDir(tmp_path).metrics) if r["kind"] == "train"
    ] == list(range(1, 9))


def test_training_is_independent_of_the_global_random_state(cfg, small_sbm):
    torch.manual_seed(1)
    a = worker(cfg, Comm(), MemorySink(), small_sbm)
    torch.manual_seed(2)
    b = worker(cfg, Comm(), MemorySink(), small_sbm)
    torch.testing.assert_close(weights(a.model), weights(b.model), rtol=0, atol=0)


def test_a_diverging_loss_stops_with_a_reason(cfg, small_sbm, monkeypatch):
    monkeypatch.setattr("cimage_dist.train.step.structure_loss", _nan_loss)
    with pytest.raises(UserError, match=r"step 1.*not finite.*lr_max"):
        worker(cfg, Comm(), MemorySink(), small_sbm)


def _nan_loss(pos: torch.Tensor, neg: torch.Tensor, *weights: Any) -> Any:
    from cimage_dist.losses import structure_loss

    a, b = structure_loss(pos, neg, *weights)
    return dataclasses.replace(a, total=a.total * math.nan), b


@pytest.mark.parametrize("symmetric", [False, True])
def test_many_steps_per_epoch_use_every_masked_edge_once(cfg, small_sbm, symmetric):
    cfg.train.batch_edges = 100
    cfg.mask.start_rate, cfg.mask.symmetric = 0.7, symmetric
    walked = 3 * 210 * (1 + symmetric)
    topology = small_sbm.topology()
    batches = FullGraphBatches(small_sbm.features(), topology, cfg, Comm())
    assert batches.steps_per_epoch == math.ceil(min(topology.num_edges, walked) / 100)
    masked = batches.masker.mask(1).masked
    parts = [
        batches.batch(step) for step in range(batches.steps_per_epoch, 2 * batches.steps_per_epoch)
    ]
    got = torch.cat([b.pairs[: b.num_pos] for b in parts])
    assert sorted(map(tuple, got.tolist())) == sorted(map(tuple, masked.tolist()))
    assert all(b.global_pos <= 100 for b in parts)


def test_no_held_out_edge_reaches_training(cfg, small_sbm, monkeypatch):
    """Every message and every positive of every step is an edge of the 85 %, and never a validation
    or test edge.
    """
    cfg.data.holdout_edges = "link"
    topology, links = training_graph(small_sbm, cfg.data, cfg.run.seed)
    assert links is not None
    n = small_sbm.num_nodes
    held = torch.cat([links.val_pos, links.test_pos])
    forbidden = torch.cat([held, held.flip(1)])
    forbidden_keys = (forbidden[:, 0] * n + forbidden[:, 1]).sort().values
    seen = []
    original = FullGraphBatches.batch

    def spy(self: FullGraphBatches, step: int) -> Any:
        batch = original(self, step)
        seen.append(batch)
        return batch

    monkeypatch.setattr(FullGraphBatches, "batch", spy)
    worker(cfg, Comm(), MemorySink(), small_sbm)
    assert len(seen) == 8
    for batch in seen:
        messages = torch.stack([batch.edges.src, batch.edges.dst], 1)
        assert not is_edge(forbidden_keys, n, messages).any()
        assert not is_edge(forbidden_keys, n, batch.pairs[: batch.num_pos]).any()
        assert is_edge(edge_keys(topology), n, batch.pairs[: batch.num_pos]).all()
    assert held.shape[0] == round(0.05 * small_sbm.num_edges / 2) + round(
        0.10 * small_sbm.num_edges / 2
    )


def test_two_processes_cannot_train_in_one_directory(cfg, tmp_path):
    with (
        LocalSink(RunDir(tmp_path), cfg.run),
        pytest.raises(UserError, match="Another process"),
        LocalSink(RunDir(tmp_path), cfg.run, catch_signals=False),
    ):
        pass


def test_a_directory_of_another_experiment_is_refused(cfg, small_sbm, tmp_path):
    cfg.run.dir = str(tmp_path / "run")
    stages.pretrain(cfg, Progress(quiet=True), small_sbm)
    cfg.model.num_layers = 1
    with pytest.raises(UserError, match=r"model\.num_layers"):
        stages.pretrain(cfg, Progress(quiet=True), small_sbm)


def test_more_epochs_continue_a_finished_run(cfg, small_sbm, tmp_path):
    cfg.run.dir = str(tmp_path / "run")
    cfg.optim.schedule = "restarts"  # which does not depend on the number of epochs
    cfg.train.epochs = 4
    assert stages.pretrain(cfg, Progress(quiet=True), small_sbm)["steps_now"] == 4
    assert stages.pretrain(cfg, Progress(quiet=True), small_sbm)["steps_now"] == 0
    cfg.train.epochs = 8
    assert stages.pretrain(cfg, Progress(quiet=True), small_sbm)["steps_now"] == 4
    whole = worker(cfg, Comm(), MemorySink(), small_sbm)
    model, saved = stages.load_model(cfg, small_sbm)
    assert saved.step == 8
    torch.testing.assert_close(weights(model), weights(whole.model), rtol=0, atol=0)


FACTORS = [
    "loss.factor_weight=0.5",
    "loss.cluster_weight=0.2",
    "ci.partition=random",
    "model.dropout=0",
]


def losses(cfg: Config, small_sbm: Any) -> list[float]:
    sink = MemorySink()
    worker(cfg, Comm(), sink, small_sbm)
    return [record["loss"] for record in sink.records if record["kind"] == "train"]


@pytest.mark.parametrize("fanouts", ["[]", "[3,3]"])
def test_half_precision_activations_follow_the_single_ones(store_dir, small_sbm, fanouts):
    common = [
        *small_sbm_settings(store_dir),
        *TINY,
        *FACTORS,
        f"sampler.fanouts={fanouts}",
        "sampler.batch_edges=64",
        "train.epochs=2",
    ]
    full, half = (
        losses(load_config(overrides=[*common, f"train.precision={name}"]), small_sbm)
        for name in ("float32", "bfloat16")
    )
    assert full != half
    np.testing.assert_allclose(half, full, rtol=0.05, atol=0.02)  # numbers of 8 bits


@pytest.mark.slow
def test_compiled_decoders_train_the_same(store_dir, small_sbm):
    """Slow: the compiler of the system translates the decoders. Without dropout, whose draws a
    compiler may make in another order.
    """
    common = [
        *small_sbm_settings(store_dir),
        *TINY,
        *FACTORS,
        "model.structure_dropout=0",
        "model.factor_dropout=0",
    ]
    plain, compiled = (
        losses(load_config(overrides=[*common, f"resources.compile={flag}"]), small_sbm)
        for flag in ("false", "true")
    )
    np.testing.assert_allclose(compiled, plain, rtol=1e-4)


def test_both_routing_backends_train_the_same(store_dir, small_sbm):
    common = [*small_sbm_settings(store_dir), *ROUTING, *TINY, *FACTORS]
    fused, reference = (
        losses(load_config(overrides=[*common, f"model.routing_backend={name}"]), small_sbm)
        for name in ("fused", "reference")
    )
    np.testing.assert_allclose(fused, reference, rtol=1e-4)
