"""What the loop records of itself: time by kind, memory, checkpoints by the clock; and MLflow."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.io.artifacts import RunDir
from cimage_dist.train.loop import worker
from cimage_dist.train.progress import Meter
from cimage_dist.train.sink import LocalSink, MemorySink
from tests.settings import small_sbm_config

TINY = [
    "model.num_factors=2",
    "model.factor_dim=2",
    "model.num_layers=1",
    "model.routing_iterations=2",
    "train.epochs=4",
    "run.log_every=2",
]


class Counting(MemorySink):
    def __init__(self) -> None:
        super().__init__()
        self.saved: list[int] = []

    def save(self, step: int, *rest: Any) -> None:
        self.saved.append(step)


def test_records_tell_where_the_time_went(store_dir, small_sbm):
    sink = MemorySink()
    worker(small_sbm_config(store_dir, *TINY), Comm(), sink, small_sbm)
    records = [r for r in sink.records if r["kind"] == "train"]
    assert [r["step"] for r in records] == [2, 4]
    for record in records:
        parts = record["sampling_s"] + record["step_s"] + record["exchange_s"]
        assert (
            0 < parts <= record["seconds"]
            and record["edges_per_s"] > 0
            and record["memory_gb"] > 0.01
        )


def test_a_checkpoint_is_due_by_the_clock(store_dir, small_sbm):
    never, always = Counting(), Counting()
    worker(small_sbm_config(store_dir, *TINY, "run.checkpoint_every=100"), Comm(), never, small_sbm)
    assert never.saved == [4]  # the last step
    worker(
        small_sbm_config(
            store_dir, *TINY, "run.checkpoint_every=100", "run.checkpoint_minutes=1e-9"
        ),
        Comm(),
        always,
        small_sbm,
    )
    assert always.saved == [1, 2, 3, 4]


def test_the_clock_starts_anew_with_each_checkpoint(store_dir, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cimage_dist.train.progress.time.perf_counter", lambda: now[0])
    meter = Meter(small_sbm_config(store_dir, "run.checkpoint_minutes=2"), torch.device("cpu"))
    now[0] = 119.0
    assert not meter.is_checkpoint_due()
    now[0] = 120.0
    assert meter.is_checkpoint_due()
    meter.checkpointed()
    assert not meter.is_checkpoint_due()


def test_accumulated_batches_make_the_step_of_their_mean_gradient(store_dir, small_sbm):
    """Two batches of 60 edges in one step: as many steps as half the batches, each batch seen
    once.
    """
    settings = [
        *TINY,
        "loss.factor_weight=0",
        "sampler.fanouts=[-1,-1]",
        "sampler.batch_edges=60",
        "train.epochs=1",
        "run.log_every=1",
        "model.dropout=0",
        "model.structure_dropout=0",
    ]
    single, double = MemorySink(), MemorySink()
    one = worker(small_sbm_config(store_dir, *settings), Comm(), single, small_sbm)
    two = worker(
        small_sbm_config(store_dir, *settings, "train.accumulate=2"), Comm(), double, small_sbm
    )
    steps = [sum(r["kind"] == "train" for r in sink.records) for sink in (single, double)]
    assert steps[1] == -(-steps[0] // 2) and one.step == steps[0] and two.step == steps[1]
    # Before the first update both see the same weights: the first accumulated loss is the mean of
    # two batch losses.
    from cimage_dist.train.step import loss_terms
    from cimage_dist.train.trainer import Trainer

    fresh = Trainer(small_sbm_config(store_dir, *settings), small_sbm, small_sbm.topology(), Comm())
    batches = fresh.remaining()
    fresh.model.train()
    first = [
        loss_terms(fresh.model, next(batches)[0], fresh.cfg, None, Comm())["structure"].item()
        for _ in range(2)
    ]
    assert next(r for r in double.records if r["kind"] == "train")["structure"] == pytest.approx(
        sum(first) / 2, rel=1e-5
    )


class FakeClient:
    logged: ClassVar[list[tuple[str, str, float, int]]] = []
    runs = 0

    def __init__(self, tracking_uri: str) -> None:
        assert tracking_uri == "sqlite:///x.db"

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment: str, run_name: str) -> Any:
        FakeClient.runs += 1
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-{FakeClient.runs}"))

    def log_metric(self, run_id: str, name: str, value: float, step: int) -> None:
        FakeClient.logged.append((run_id, name, value, step))

    def set_terminated(self, run_id: str) -> None:
        pass


def test_mlflow_gets_the_same_metrics_and_one_run_per_directory(store_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules,
        "mlflow",
        types.SimpleNamespace(tracking=types.SimpleNamespace(MlflowClient=FakeClient)),
    )
    cfg = small_sbm_config(store_dir, "run.tensorboard=False")
    cfg.run.mlflow = "sqlite:///x.db"
    for step in (1, 2):
        with LocalSink(RunDir(tmp_path), cfg.run, catch_signals=False) as sink:
            sink.log("train", step, {"loss": 0.5, "note": "text"})
    assert FakeClient.logged == [("run-1", "train/loss", 0.5, 1), ("run-1", "train/loss", 0.5, 2)]


def test_mlflow_that_is_not_there_is_told_before_training(store_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    cfg = small_sbm_config(store_dir)
    cfg.run.mlflow = "sqlite:///x.db"
    with (
        pytest.raises(UserError, match="pip install mlflow"),
        LocalSink(RunDir(tmp_path), cfg.run, catch_signals=False),
    ):
        pass
