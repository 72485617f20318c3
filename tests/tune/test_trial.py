"""A trial's process without a cluster: it reports and waits, stops and continues, fails with a
reason, hands weights over, serves trials in turn.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cimage_dist.config_loading import to_yaml
from cimage_dist.distributed.tune_trial import TrialProcess
from cimage_dist.errors import UserError
from cimage_dist.io import checkpoint
from cimage_dist.tune.ledger import Ledger, Trial, read_outcome, standings, trial_config
from cimage_dist.tune.plan import Plan
from cimage_dist.tune.spec import Sweep, load_sweep, prepare
from tests.conftest import small_sbm_settings

TRAINING = [
    "model.num_factors=3",
    "model.factor_dim=4",
    "model.num_layers=2",
    "model.routing_iterations=2",
    "train.epochs=12",
    "train.validate_every=3",
]
TRAINING += [
    "train.select=val",
    "eval.probe_epochs=10",
    "run.tensorboard=false",
    "run.log_every=1",
    "run.checkpoint_every=4",
    "resources.threads=1",
]


def made(tmp_path: Path, store_dir: Path, space: str, *more: str) -> tuple[Sweep, Ledger]:
    (tmp_path / "space.yaml").write_text(space)
    sweep = load_sweep(
        [str(tmp_path / "space.yaml")], [*small_sbm_settings(store_dir), *TRAINING, *more]
    )
    ledger = Ledger(tmp_path / "sweep")
    prepare(sweep, sweep.base, ledger, lambda text: None)
    return sweep, ledger


def begin(ledger: Ledger, trial: Trial, process: TrialProcess | None = None) -> TrialProcess:
    if trial.id not in ledger.trials:
        ledger.add(trial)
    job = {"root": str(ledger.root), "trial": trial.id, "is_parallel": False}
    if process is None:
        return TrialProcess(job)
    assert process.reset_config(job)
    return process


def run_to_end(process: TrialProcess) -> list[dict[str, Any]]:
    results = [process.step()]
    while not results[-1].get("done"):
        results.append(process.step())
    return results


CHOICE = "search: grid\nbaseline: false\nspace:\n  optim.lr_max: [0.01, 0.02, 1.0e+30]\n"


def test_one_process_serves_good_and_bad_trials(tmp_path: Path, store_dir: Path) -> None:
    _, ledger = made(tmp_path, store_dir, CHOICE, "optim.lr_min=0.001")
    first = Trial("p0000-s0", 0, {"optim.lr_max": 0.01}, 0)
    process = begin(ledger, first)
    results = run_to_end(process)
    assert [r["epoch"] for r in results] == [3, 6, 9, 12, 12] and [
        r.get("done", False) for r in results
    ] == [False] * 4 + [True]
    scores = [r["score"] for r in results]
    assert scores == sorted(scores), "the best so far"
    summary = json.loads((ledger.folder(first.id) / "summary.json").read_text())
    found = ledger.reread(first.id)
    assert (
        found is not None
        and found.status == "done"
        and found.score == summary["best"]["score"] == scores[-1]
        and found.is_first
    )

    run_to_end(begin(ledger, Trial("p0001-s0", 1, {"optim.lr_max": 1e30}, 0), process))
    bad = ledger.reread("p0001-s0")
    assert (
        bad is not None
        and bad.status == "failed"
        and "Training diverged" in bad.reason
        and bad.score is None
    )
    assert "Training diverged" in (ledger.folder("p0001-s0") / "failure.txt").read_text()

    run_to_end(begin(ledger, Trial("p0002-s0", 2, {"optim.lr_max": 0.0001}, 0), process))
    unfit = ledger.reread("p0002-s0")
    assert unfit is not None and unfit.status == "failed" and "optim.lr_min" in unfit.reason, (
        "a combination the config refuses"
    )

    run_to_end(begin(ledger, Trial("p0003-s0", 3, {"optim.lr_max": 0.01}, 0), process))
    again = ledger.reread("p0003-s0")
    assert (
        again is not None
        and again.score == found.score
        and not again.is_first
        and again.process == found.process
    )
    assert [row.status for row in standings(ledger, "search")] == [
        "done",
        "done",
        "failed",
        "failed",
    ]


def test_a_stopped_trial_saves_and_can_go_on(tmp_path: Path, store_dir: Path) -> None:
    """It waits for leave after each score, keeps what it has, and a later process ends as if it
    had never stopped.
    """
    _, ledger = made(tmp_path, store_dir, CHOICE)
    whole, cut = (
        Trial("p0000-s0", 0, {"optim.lr_max": 0.01}, 0),
        Trial("p0001-s0", 1, {"optim.lr_max": 0.01}, 0),
    )
    run_to_end(begin(ledger, whole))
    process = begin(ledger, cut)
    assert process.step()["step"] == 3
    process.cleanup()
    folder = ledger.folder(cut.id)
    saved = checkpoint.load_latest(folder / "ckpt")
    assert saved is not None and saved.step == 4, "one step after the decision"
    assert read_outcome(folder) is None, "the sweep records a stop, not the process"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 4, (
        "so that it can be reported on"
    )
    assert [r["step"] for r in run_to_end(begin(ledger, cut))] == [6, 9, 12, 12]
    a, b = (checkpoint.load_latest(ledger.folder(t.id) / "ckpt") for t in (whole, cut))
    assert (
        a is not None
        and b is not None
        and a.meta == b.meta
        and all(bool((a.tensors[name] == b.tensors[name]).all()) for name in a.tensors)
    )
    one, other = ledger.reread(whole.id), ledger.reread(cut.id)
    assert one is not None and other is not None and one.score == other.score


def test_a_population_hands_weights_over(tmp_path: Path, store_dir: Path) -> None:
    space = (
        "search: random\nscheduler: pbt\ntrials: 4\ninterval_epochs: 4\ntop: "
        "1\nfresh_seeds: 1\nspace:\n  optim.lr_max: {low: 2.0e-3, high: 3.0e-2, log: true}\n"
    )
    sweep, ledger = made(tmp_path, store_dir, space, "optim.schedule=cosine")
    plan, process = Plan(sweep, ledger), None
    while (trial := plan.next(0.0)) is not None:
        assert isinstance(trial, Trial)
        process = begin(ledger, trial, process)
        run_to_end(process)
        found = ledger.reread(trial.id)
        assert found is not None and found.status == "done", found
    assert len(ledger.of("search")) == 12
    moved = [
        t for t in ledger.of("search") if t.parent and ledger.trials[t.parent].point != t.point
    ]
    assert moved, "someone took over another's weights"
    for trial in ledger.of("search"):
        records = [
            json.loads(line)
            for line in (ledger.folder(trial.id) / "metrics.jsonl").read_text().splitlines()
        ]
        steps = [r["step"] for r in records if r["kind"] == "train"]
        assert steps == list(range(1, 4 * (trial.generation + 1) + 1)), (
            "one history, through every hand-over"
        )
        saved = checkpoint.load_latest(ledger.folder(trial.id) / "ckpt")
        assert (
            saved is not None
            and saved.meta["optimizer"][0]["initial_lr"] == trial.values["optim.lr_max"]
        )
        cfg = trial_config(ledger.root, trial)
        assert cfg.train.epochs == 4 * (trial.generation + 1)
        # One cosine over all generations, between the rates of each.
        optim, final = cfg.optim, steps[-1] / cfg.optim.schedule_epochs
        assert optim.schedule == "cosine" and optim.schedule_epochs == sweep.base.train.epochs
        share = (1 + math.cos(math.pi * final)) / 2
        rate = optim.lr_min + (optim.lr_max - optim.lr_min) * share
        assert saved.meta["optimizer"][0]["lr"] == pytest.approx(rate, abs=1e-12)


def test_views_are_scored_beside(tmp_path: Path, store_dir: Path) -> None:
    space = "search: grid\nbaseline: false\nviews: true\nspace:\n  ci.partition: [random]\n"
    _, ledger = made(tmp_path, store_dir, space, "loss.factor_weight=0.5", "model.num_factors=4")
    run_to_end(begin(ledger, Trial("p0000-s0", 0, {"ci.partition": "random"}, 0)))
    found = ledger.reread("p0000-s0")
    assert found is not None and found.views is not None, found
    assert found.views["f1_factors"] == 2 and all(
        0 <= found.views[name] <= 100 for name in ("f1", "f2", "both")
    )


def test_another_sweep_does_not_take_the_directory(tmp_path: Path, store_dir: Path) -> None:
    sweep, ledger = made(tmp_path, store_dir, CHOICE)
    assert (ledger.root / "base.yaml").read_text() == to_yaml(sweep.base)
    with pytest.raises(UserError, match="holds another sweep"):
        made(tmp_path, store_dir, CHOICE.replace("0.02", "0.03"))
