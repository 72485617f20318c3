"""What runs next follows from the files: budgets, seeds, finalists, and a kill at any moment."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from cimage_dist.errors import UserError
from cimage_dist.tune.ledger import Ledger, Trial, locked, standings
from cimage_dist.tune.plan import Plan, suggest, winner
from cimage_dist.tune.spec import Sweep

from .conftest import SPACE, MakeSweep, end


def run_all(sweep: Sweep, ledger: Ledger, slots: int = 1) -> list[str]:
    """Run the plan to its end with made-up outcomes; the ids in the order they were handed out."""
    plan, order, running = Plan(sweep, ledger), [], []
    while True:
        found = plan.next(0.0)
        if isinstance(found, Trial):
            order.append(found.id)
            running.append(found)
        if found is None and not running:
            return order
        if found is None or found == "wait" or len(running) == slots:
            assert running, "the plan waits for nothing"
            end(ledger, running.pop(0))


def test_the_given_settings_come_first_and_finalists_last(
    make_sweep: MakeSweep, ledger: Ledger
) -> None:
    sweep = make_sweep()
    order = run_all(sweep, ledger)
    assert order[:6] == [f"p000{i}-s0" for i in range(6)]
    assert ledger.trials["p0000-s0"].values == {
        "model.num_factors": 16,
        "optim.lr_max": 0.01,
        "ci.partition": "ci",
    }
    best = [row.point for row in standings(ledger, "search")][:2]
    finalists = best if 0 in best else [*best, 0]
    assert order[6:] == [f"p{point:04d}-fresh-s{seed}" for seed in (1, 2) for point in finalists]
    assert winner(sweep, ledger) == standings(ledger, "fresh")[0]
    assert run_all(sweep, ledger) == [], "a finished sweep has nothing to do"


def test_seeds_of_a_point_and_fresh_ones_differ(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep(SPACE, "sweep.seeds=3", "sweep.trials=2", "run.seed=10")
    run_all(sweep, ledger)
    assert sorted({t.seed for t in ledger.of("search")}) == [10, 11, 12]
    assert sorted({t.seed for t in ledger.of("fresh")}) == [13, 14]
    row = standings(ledger, "search")[0]
    assert row.mean == pytest.approx(sum(row.scores) / 3) and len(row.scores) == 3 and row.std > 0


def test_a_raised_budget_goes_on(make_sweep: MakeSweep, ledger: Ledger) -> None:
    run_all(make_sweep(), ledger)
    more = run_all(make_sweep(SPACE, "sweep.trials=8"), ledger)
    assert more[:2] == ["p0006-s0", "p0007-s0"]


@pytest.mark.parametrize(
    ("setting", "count"), [("sweep.trials=3", 3), ("sweep.epochs=80", 4), ("sweep.epochs=70", 4)]
)
def test_budgets_by_trials_and_epochs(
    make_sweep: MakeSweep, ledger: Ledger, setting: str, count: int
) -> None:
    """20 epochs each; the trial that crosses the line is still finished."""
    run_all(make_sweep(SPACE, setting), ledger)
    assert len(ledger.of("search")) == count


def test_budget_by_time(make_sweep: MakeSweep, ledger: Ledger) -> None:
    plan = Plan(make_sweep(SPACE, "sweep.time_s=60"), ledger)
    first = plan.next(59.0)
    assert isinstance(first, Trial) and plan.next(61.0) == "wait", (
        "no new point after the time, and the running one is waited for"
    )
    end(ledger, first)
    fresh = plan.next(61.0)
    assert isinstance(fresh, Trial) and fresh.stage == "fresh"


def test_a_grid_ends_with_its_points(make_sweep: MakeSweep, ledger: Ledger) -> None:
    text = (
        "search: grid\nbaseline: false\ntop: 0\nseeds: 2\nspace:\n  optim.lr_max: [0.01, "
        "0.02]\n  ci.partition: [ci, random]\n"
    )
    order = run_all(make_sweep(text), ledger)
    assert len(order) == 8 and not ledger.of("fresh")


def test_failed_points_are_kept_and_never_win(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep(SPACE, "sweep.baseline=false")
    plan = Plan(sweep, ledger)
    for i in range(6):
        trial = plan.next(0.0)
        assert isinstance(trial, Trial)
        end(ledger, trial, "failed" if i < 4 else "stopped" if i == 4 else "done")
    rows = standings(ledger, "search")
    assert [row.status for row in rows] == [
        "done",
        "stopped",
        "failed",
        "failed",
        "failed",
        "failed",
    ]
    assert {row.point for row in plan.finalists()} == {4, 5}


def test_all_failed_names_nobody(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep()
    plan = Plan(sweep, ledger)
    while isinstance(trial := plan.next(0.0), Trial):
        end(ledger, trial, "failed")
    assert trial is None and winner(sweep, ledger) is None


@pytest.mark.parametrize("kind", ["random", "tpe", "pbt"])
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_moment(make_sweep: MakeSweep, tmp_path: Path, kind: str, seed: int) -> None:
    """Kills between any two writes: nothing finished runs again, nothing is lost, and with one
    trial at a time the search is the same.
    """
    text = (
        SPACE
        if kind != "pbt"
        else SPACE.replace(
            "model.num_factors: [4, 8, 16]", "model.dropout: [0.1, 0.2, 0.3]"
        ).replace("ci.partition: [ci, random]", "loss.sce_power: [1, 2]")
    )
    extra = {
        "random": ["sweep.seeds=2"],
        "tpe": ["sweep.search=tpe", "sweep.trials=14"],
        "pbt": ["sweep.scheduler=pbt", "sweep.interval_epochs=5"],
    }[kind]
    sweep = make_sweep(text, *extra)
    whole = Ledger(tmp_path / "whole")
    run_all(sweep, whole)
    draw, root, ended = random.Random(seed), tmp_path / "killed", []
    for _ in range(500):
        ledger = Ledger(root)
        assert set(ended) <= set(ledger.outcomes), "a finished trial is lost"
        plan = Plan(sweep, ledger)
        over = False
        for _ in range(draw.randint(1, 3)):
            found = plan.next(0.0)
            if found is None:
                over = True
                break
            assert isinstance(found, Trial) and found.id not in ended, "a finished trial runs again"
            if (
                draw.random() < 0.3
            ):  # killed while it runs; perhaps while several records were written
                made = [t for t in ledger.trials.values() if t.id not in ledger.outcomes]
                if len(made) > 1 and draw.random() < 0.5:
                    shutil.rmtree(ledger.folder(made[-1].id))
                break
            end(ledger, found)
            ended.append(found.id)
        if over:
            break
    assert over
    assert {t: (v.values, v.seed) for t, v in ledger.trials.items()} == {
        t: (v.values, v.seed) for t, v in whole.trials.items()
    }
    assert len(ended) == len(set(ended)) == len(whole.outcomes)


def test_tpe_finds_the_better_half(make_sweep: MakeSweep, ledger: Ledger) -> None:
    """Of the last 15 of 40 points more lie near the optimum than by chance; and a suggestion is
    a function of the history.
    """
    sweep = make_sweep(
        SPACE, "sweep.search=tpe", "sweep.trials=40", "sweep.top=0", "sweep.baseline=false"
    )
    run_all(sweep, ledger)
    late = [t for t in ledger.of("search") if t.point >= 25]
    assert sum(0.01 < t.values["optim.lr_max"] < 0.04 for t in late) >= 8, "by chance 35 % of 15"
    history = standings(ledger, "search")
    assert suggest("tpe", sweep.space, 0, 40, history) == suggest(
        "tpe", sweep.space, 0, 40, history
    )


def test_a_finite_space_runs_out(make_sweep: MakeSweep, ledger: Ledger) -> None:
    text = (
        "search: tpe\nbaseline: false\ntop: 0\ntrials: 50\nspace:\n  optim.lr_max: [0.01, "
        "0.02, 0.03]\n  ci.partition: [ci, random]\n"
    )
    run_all(make_sweep(text), ledger)
    assert len(ledger.of("search")) == 6


def test_one_command_at_a_time(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(UserError, match="Another command is running the sweep"),
        locked(tmp_path),
    ):
        pass
