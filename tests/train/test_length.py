"""How long a run is, by steps and by passes, in both regimes; and when it ends, as is printed."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cimage_dist.comm import Comm
from cimage_dist.config import SAMPLED_STEPS, Config, fingerprint
from cimage_dist.config_loading import load_config
from cimage_dist.errors import Interrupted, UserError
from cimage_dist.io import checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.pipeline import stages
from cimage_dist.planning import make_plan
from cimage_dist.train.loop import worker
from cimage_dist.train.progress import Pace, Progress, describe_length
from cimage_dist.train.sink import LocalSink, MemorySink
from cimage_dist.train.trainer import Trainer
from tests.settings import small_sbm_config
from tests.train.test_training import StopAfter, numbers

SMALL = [
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "loss.factor_weight=0",
    "run.tensorboard=false",
    "run.log_every=1",
]
SAMPLED = ["sampler.fanouts=[4,4]", "sampler.batch_edges=100", "sampler.backend=csr"]
QUIET = Progress(quiet=True)


@pytest.mark.parametrize(
    ("overrides", "per_epoch", "steps"),
    [
        ([], 1, 30),
        ([], 3, 90),
        (["train.epochs=7"], 3, 21),
        (["train.steps=7"], 3, 7),
        (["train.steps=7", "train.epochs=2"], 3, 6),
        (["train.steps=5", "train.epochs=2"], 3, 5),
        (["sampler.fanouts=[5,5]"], 557, SAMPLED_STEPS),
        (["sampler.fanouts=[5,5]", "train.epochs=30"], 557, 30 * 557),
        (["sampler.fanouts=[5,5]", "train.steps=7"], 557, 7),
        (["train.epochs=7", "train.accumulate=2"], 3, 11),
        (["train.steps=7", "train.accumulate=2"], 3, 7),
        (["train.steps=7", "train.accumulate=2", "train.epochs=3"], 3, 5),
    ],
)
def test_steps_of_a_run(overrides: list[str], per_epoch: int, steps: int) -> None:
    assert load_config(overrides=overrides).total_steps(per_epoch) == steps


def test_what_was_trained_before_keeps_its_name() -> None:
    def name(*overrides: str) -> str:
        return fingerprint(load_config(overrides=overrides))

    sampled = "sampler.fanouts=[5,5]"
    # As in the version before train.steps, holdout_edges=auto and edge factors.
    before = "model.edge_factors=0"
    assert name(before) == name(before, "data.holdout_edges=none") == "fc7c7134c451"
    assert name() == name("train.epochs=30") != name(before)
    assert name(sampled, "train.epochs=3", before) == "a9a33651d76c"
    assert name(sampled) != name(sampled, "train.epochs=30")
    names = {
        name(*more) for more in ([], ["train.steps=30"], ["train.epochs=30", "train.steps=30"])
    }
    assert len(names) == 3


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_a_run_stops_at_its_steps_and_the_rate_ends_there(kind, store_dir, small_sbm) -> None:
    more = SAMPLED if kind == "sampled" else []
    cfg = small_sbm_config(store_dir, *SMALL, *more, "train.steps=5")
    sink = MemorySink()
    trainer = worker(cfg, Comm(), sink, small_sbm)
    train = [r for r in sink.records if r["kind"] == "train"]
    assert trainer.step == 5 and {r["total_steps"] for r in train} == {5}
    assert train[-1]["lr"] == pytest.approx(0.0, abs=1e-12) and train[0]["lr"] > 0.002
    assert make_plan(cfg)["steps"]["total_steps"] == 5


def test_a_sampled_run_that_says_nothing_of_its_length_is_short(store_dir, small_sbm) -> None:
    cfg = small_sbm_config(store_dir, *SMALL, *SAMPLED, "sampler.batch_edges=2")
    trainer = Trainer(cfg, small_sbm, small_sbm.topology(), Comm())
    assert trainer.batches.steps_per_epoch > 500 and trainer.total_steps == SAMPLED_STEPS
    assert make_plan(cfg)["steps"]["total_steps"] == SAMPLED_STEPS
    said = describe_length(cfg, small_sbm)
    assert f"{SAMPLED_STEPS} steps" in said and "default of sampled runs" in said


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_runs_by_steps_resume_to_the_last_bit(kind, store_dir, small_sbm, tmp_path) -> None:
    more = [*SAMPLED, "train.accumulate=2"] if kind == "sampled" else []
    cfg = small_sbm_config(store_dir, *SMALL, *more, "train.steps=6")
    with LocalSink(RunDir(tmp_path / "whole"), cfg.run) as sink:
        worker(cfg, Comm(), sink, small_sbm)
    with (
        StopAfter(RunDir(tmp_path / "parts"), cfg.run, steps=3) as sink,
        pytest.raises(Interrupted),
    ):
        worker(cfg, Comm(), sink, small_sbm)
    with LocalSink(RunDir(tmp_path / "parts"), cfg.run) as sink:
        assert worker(cfg, Comm(), sink, small_sbm).step == 6
    assert numbers(RunDir(tmp_path / "parts")) == numbers(RunDir(tmp_path / "whole"))
    a, b = (checkpoint.load_latest(tmp_path / name / "ckpt") for name in ("whole", "parts"))
    assert a is not None and b is not None and a.meta == b.meta
    torch.testing.assert_close(a.tensors, b.tensors, rtol=0, atol=0)


def test_more_steps_continue_a_run_and_fewer_do_not(store_dir, small_sbm, tmp_path) -> None:
    def trained(**length: int | None) -> dict[str, Any]:
        cfg = small_sbm_config(store_dir, *SMALL, f"run.dir={tmp_path / 'run'}")
        for name, value in length.items():
            setattr(cfg.train, name, value)
        return stages.pretrain(cfg, QUIET, small_sbm)

    assert trained(epochs=2)["steps_now"] == 2
    assert trained(steps=2)["steps_now"] == 0  # the same length in other words
    assert trained(steps=4)["steps_now"] == 2
    assert trained(epochs=6)["steps_now"] == 2
    assert trained(steps=8)["epochs"] is None
    for shorter in ({"steps": 7}, {"epochs": 7}, {"epochs": 30, "steps": 7}):
        with pytest.raises(UserError, match=r"train\.(steps|epochs)"):
            trained(**shorter)


def test_initial_labels_take_no_more_steps_than_the_run(store_dir, small_sbm) -> None:
    totals: dict[str, int] = {}

    class Ticks(MemorySink):
        def tick(self, step, total, metrics, stage="pretrain") -> None:
            totals[stage] = total

    more = ["loss.factor_weight=0.1", "cluster.init=selfkmeans", "ci.max_samples=200"]
    cfg = small_sbm_config(store_dir, *SMALL, *SAMPLED, *more, "train.steps=3")
    worker(cfg, Comm(), Ticks(), small_sbm)
    assert totals["initial labels"] == 3 and totals["pretrain"] == 3


def test_fan_outs_that_do_not_fit_are_refused_by_plan_and_pretrain_alike(
    store_dir, small_sbm, tmp_path
) -> None:
    def attempts(*more: str) -> list[str]:
        cfg = small_sbm_config(
            store_dir, *SMALL, *SAMPLED, "train.steps=1", f"run.dir={tmp_path / 'run'}", *more
        )
        said = []
        for act in (
            lambda: make_plan(cfg),
            lambda: stages.pretrain(cfg, QUIET, small_sbm),
            lambda: stages.train(cfg, Comm(), MemorySink(), small_sbm),
        ):
            try:
                act()
                said.append("")
            except UserError as error:
                said.append(str(error))
        return said

    routing = ["model.propagation=routing", "model.tail=true", "model.teleport=0"]
    for wrong in (routing, ["sampler.fanouts=[4,4,4]"]):
        said = attempts(*wrong)
        assert all("sampler.fanouts has" in text and "Give" in text for text in said), said
    assert not (tmp_path / "run").exists()
    assert attempts(*routing, "model.num_layers=0") == ["", "", ""]  # the layers follow the hops
    assert attempts("model.num_layers=3", f"run.dir={tmp_path / 'gcn'}") == ["", "", ""]


def test_layers_that_are_open_follow_the_hops() -> None:
    routing = load_config(overrides=["model.propagation=routing", "model.tail=true"]).model
    assert [routing.sized(8, 10**6, 4 * 10**6, hops).num_layers for hops in (2, 3, 5)] == [1, 2, 4]
    assert Config().model.sized(8, 10**6, 4 * 10**6, 2).num_layers == 6


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_lines_off_a_terminal_are_rare_and_tell_the_end(capsys) -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    shown = []
    for step in range(1, 1001):
        clock.now += 1.0
        progress.update(step, 1000, {"loss": 0.5})
        if text := capsys.readouterr().err:
            shown.append((clock.now - 1000.0, text))
    times = [at for at, _ in shown]
    assert times[0] == 5.0 and times[-1] == 1000.0
    assert all(later - before == 30.0 for before, later in itertools.pairwise(times[:-1]))
    assert "pretrain 5/1000  loss 0.5  1 steps/s  ends about " in shown[0][1]
    assert "in 17 min" in shown[0][1] and "ends" not in shown[-1][1]


def test_a_slow_first_step_is_shown_at_once_and_a_quick_stage_once(capsys) -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    clock.now += 60.0
    progress.update(1, 100, {})
    assert "pretrain 1/100" in capsys.readouterr().err
    for step in range(1, 201):
        progress.update(step, 200, {}, "labels")
    said = capsys.readouterr().err
    assert said.startswith("labels 200/200") and said.count("\n") == 1


def test_the_estimate_is_told_once_after_three_steps() -> None:
    clock = Clock()
    pace = Pace(total=100, every=10, clock=clock)
    told = []
    for step in range(1, 101):
        is_due = (step - 1) % 10 == 0
        with pace.refresh(is_due):
            clock.now += 6.0 if is_due else 0.0
        clock.now += 30.0 if step == 1 else 2.0  # the first one compiles
        told.append(pace.after(step))
    assert [at for at, text in enumerate(told, 1) if text] == [3]
    # 97 steps of 2 s and nine refreshes of 6 s are 248 s.
    assert told[2].startswith("100 steps of 2 s as measured here, 9 refreshes of 6 s: ends about ")
    assert told[2].endswith("in 4 min")


def test_short_runs_tell_no_estimate() -> None:
    pace = Pace(total=3, every=10)
    assert [pace.after(step) for step in (1, 2, 3)] == [None, None, None]
