"""What a sweep leaves behind: tables, the winner's config, importance, the page; and what
population-based training hands over.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from cimage_dist.config import OptimConfig
from cimage_dist.config_loading import load_config
from cimage_dist.data.store import Graph
from cimage_dist.errors import UserError
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.tune.ledger import (
    Ledger,
    Standing,
    Trial,
    hand_over,
    objective,
    reports,
    standings,
)
from cimage_dist.tune.page import sections, write_page
from cimage_dist.tune.plan import Plan, generations, importance, winner
from cimage_dist.tune.results import rows, summary, write_best, write_tables
from cimage_dist.tune.spec import check_validation
from tests.pages import LOOKS, looked_at

from .conftest import SPACE, MakeSweep, end, write_base
from .test_plan import run_all


def test_tables_hold_every_trial(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep(
        "search: random\ntrials: 4\ntop: 1\nspace:\n  optim.lr_max: {low: 2e-3, high: 0.1}\n  "
        "sampler.fanouts: [[], [10, 5]]\n  ci.target: [null, 3]\n"
    )
    run_all(sweep, ledger)
    write_tables(sweep, ledger)
    table, parquet = (
        pd.read_csv(ledger.root / "results.csv"),
        pd.read_parquet(ledger.root / "results.parquet"),
    )
    assert list(table.trial) == list(parquet.trial) == list(ledger.trials) and len(table) == len(
        rows(sweep, ledger)
    )
    assert set(table["sampler.fanouts"]) <= {"[]", "[10, 5]"} and (table.status == "done").all()
    assert table.val_score.tolist() == pytest.approx([o.score for o in ledger.outcomes.values()])


def test_best_yaml_is_the_winner(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep()
    run_all(sweep, ledger)
    best = winner(sweep, ledger)
    assert best is not None
    write_best(sweep, ledger, best)
    cfg = load_config(ledger.root / "best.yaml")
    assert (cfg.optim.lr_max, cfg.model.num_factors, cfg.ci.partition) == tuple(
        best.values[k] for k in ("optim.lr_max", "model.num_factors", "ci.partition")
    )
    assert cfg.run.seed == 1 and cfg.run.dir is None and cfg.train.epochs == 20


def test_the_gain_is_paired_by_seed(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep()
    run_all(sweep, ledger)
    found = summary(sweep, ledger)
    given = next(row for row in found["fresh"] if row["point"] == 0)
    assert found["winner"]["point"] != 0 and found["gain_over_given"]["mean"] == pytest.approx(
        found["winner"]["mean"] - given["mean"]
    )
    assert found["gain_over_given"]["standard_error"] == pytest.approx(0, abs=1e-9), (
        "the made-up scores differ by the same at every seed"
    )
    assert found["trials"] == {
        "done": len(ledger.trials),
        "stopped": 0,
        "failed": 0,
        "unfinished": 0,
    }


def test_importance_finds_what_mattered(make_sweep: MakeSweep) -> None:
    sweep = make_sweep()
    made = [
        {"model.num_factors": k, "optim.lr_max": 0.004 * i, "ci.partition": p}
        for k in (4, 8, 16)
        for i in range(1, 8)
        for p in ("ci", "random")
    ]
    scored = [
        Standing(
            i,
            values,
            "done",
            (50 + 100 * values["optim.lr_max"] + (values["ci.partition"] == "ci"),),
            20,
        )
        for i, values in enumerate(made)
    ]
    shares = importance(sweep.space, scored)
    assert (
        sum(shares.values()) == pytest.approx(1)
        and shares["optim.lr_max"] > shares["ci.partition"] > 5 * shares["model.num_factors"]
    )
    assert importance(sweep.space, scored[:4]) == {}, "too few to say"


def test_the_page_stands_alone(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep()
    write_base(sweep, ledger)
    plan = Plan(sweep, ledger)
    for i in range(6):
        trial = plan.next(0.0)
        assert isinstance(trial, Trial)
        lines = [
            {"kind": "train", "step": 20, "total_steps": 20},
            {"kind": "val", "step": 10, "score": 50.0},
            {"kind": "val", "step": 20, "score": 40.0},
        ]
        (ledger.folder(trial.id) / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        end(ledger, trial, "failed" if i == 3 else "done")
    found = summary(sweep, ledger)
    found["failures"]["p0003-s0"] = "</script><script>alert(1)</script>"
    write_page(sweep, ledger, found)
    charts = {
        chart["title"]: chart for part in sections(sweep, ledger, found) for chart in part["charts"]
    }
    first = [row for row in charts["Training curves"]["data"] if row["trial"] == "p0000-s0"]
    assert [(row["epoch"], row["score"]) for row in first] == [(10.0, 50.0), (20.0, 50.0)], (
        "the best so far, as selection sees it"
    )
    assert set(charts) == {
        "Settings and scores",
        "Score by setting",
        "Best so far",
        "Training curves",
        "Best first",
        "Reasons",
    }
    words = (ledger.root / "index.html").read_text().partition("<script")[0]
    assert "&lt;/script&gt;&lt;script&gt;alert" in words, "a reason cannot break out of its cell"
    body = re.sub(r"<footer>.*?</footer>", "", words)  # which links to the paper
    assert not re.search(r"(src|href)\s*=\s*\"(?!#|data:)|url\(|@import|https?://", body), (
        "nothing is fetched"
    )


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_in_a_browser(
    make_sweep: MakeSweep, ledger: Ledger, browser: Any, width: int, scheme: str
) -> None:
    sweep = make_sweep(SPACE, "sweep.trials=12")
    write_base(sweep, ledger)
    run_all(sweep, ledger)
    for trial in ledger.trials.values():
        lines = [
            {"kind": "train", "step": 20, "total_steps": 20},
            *({"kind": "val", "step": s, "score": 40.0 + s} for s in (5, 10, 20)),
        ]
        (ledger.folder(trial.id) / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    write_page(sweep, ledger, summary(sweep, ledger))
    expected = {
        "Settings and scores",
        "Score by setting",
        "Best so far",
        "What mattered",
        "Training curves",
        "Every seed",
        "Finalists",
        "Best first",
    }
    assert looked_at(browser, ledger.root / "index.html", width, scheme) == expected


def test_reports_follow_the_selection(tmp_path: Path) -> None:
    lines = [{"kind": "val", "step": s, "score": v} for s, v in ((5, 70.0), (10, 60.0))] + [
        {"kind": "train", "step": 10, "total_steps": 20}
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "val", "st'
    )
    assert [r["score"] for r in reports(tmp_path, 40, "val")] == [70.0, 70.0]
    assert [(r["score"], r["epoch"]) for r in reports(tmp_path, 40, "last")] == [
        (70.0, 10.0),
        (60.0, 20.0),
    ]
    assert objective([1.0, 3.0, 2.0], "val") == 3.0 and objective([1.0, 3.0, 2.0], "last") == 2.0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.validate_every=0", "train.select=last"], "train.validate_every is 0"),
        (["train.validate_by=link"], "no edges are held out"),
    ],
)
def test_a_sweep_needs_something_to_choose_by(
    digits: Graph, overrides: list[str], said: str
) -> None:
    good = ["train.validate_every=5", "train.select=val"]
    check_validation(load_config(overrides=good), digits)
    check_validation(load_config(overrides=[*good, "data.holdout_edges=link"]), digits)
    with pytest.raises(UserError, match=said):
        check_validation(load_config(overrides=[*good, *overrides]), digits)


POPULATION = (
    "search: random\nscheduler: pbt\ntrials: 8\ninterval_epochs: 5\ntop: "
    "2\nfresh_seeds: 1\nspace:\n  optim.lr_max: {low: 2e-3, high: 0.1, log: true}\n  "
    "model.num_layers: {low: 1, high: 6}\n"
)


def test_a_population_moves_to_the_better(make_sweep: MakeSweep, ledger: Ledger) -> None:
    sweep = make_sweep(POPULATION)
    assert generations(sweep) == [5, 10, 15, 20]
    run_all(sweep, ledger)
    found = {g: [t for t in ledger.of("search") if t.generation == g] for g in range(4)}
    assert {len(trials) for trials in found.values()} == {8}
    moved = [t for t in found[1] if t.parent != f"p{t.point:04d}-g00"]
    assert len(moved) == 2, "a quarter of eight"
    best = sorted(found[0], key=lambda t: -(ledger.outcomes[t.id].score or 0))[:2]
    assert {t.parent for t in moved} <= {t.id for t in best}
    stayed = [t for t in found[1] if t not in moved]
    assert all(t.values == ledger.trials[t.parent or ""].values for t in stayed)
    means = [sum(ledger.outcomes[t.id].score or 0 for t in trials) / 8 for trials in found.values()]
    assert means[-1] > means[0]
    assert {t.point for t in ledger.of("fresh")} >= {0}, (
        "the given settings are among the finalists"
    )
    assert all(t.epochs is None for t in ledger.of("fresh")), "fresh runs are whole runs"


def test_handed_over_weights_and_new_rates(tmp_path: Path) -> None:
    """A model's checkpoint continues with its weights, its place in the schedule and the other
    settings, and training obeys them.
    """
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10, 2, 0.001)
    for _ in range(7):
        weight.sum().backward()
        optimizer.step()
        scheduler.step()
    slots, groups = checkpoint.pack_optimizer(optimizer)
    meta = {
        "optimizer": groups,
        "scheduler": scheduler.state_dict(),
        "best": {"score": 1.0, "step": 7},
    }
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint.save(old / "ckpt", 7, {"model.w": weight.detach(), **slots}, meta)
    checkpoint.point(old / "ckpt", "BEST", 7)
    artifacts.write_tensors(old / "pseudo-labels", {"labels": torch.arange(3)})
    (old / "metrics.jsonl").write_text('{"kind": "val", "step": 7, "score": 1.0}\n')
    wanted = OptimConfig(lr_max=0.05, lr_min=0.002, schedule="restarts", weight_decay=0.3)
    hand_over(old, new, wanted)
    hand_over(old, new, OptimConfig(lr_max=1.0))  # once only
    saved = checkpoint.load_latest(new / "ckpt")
    assert (
        saved is not None
        and saved.step == 7
        and (new / "ckpt" / "BEST").read_text() == (old / "ckpt" / "BEST").read_text()
    )
    assert (
        torch.equal(saved.tensors["model.w"], weight.detach())
        and artifacts.read_tensors(new / "pseudo-labels") is not None
    )
    fresh = torch.optim.Adam(
        [torch.nn.Parameter(torch.ones(3))], lr=wanted.lr_max, weight_decay=wanted.weight_decay
    )
    expected = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(fresh, 10, 2, wanted.lr_min)
    for _ in range(7):
        fresh.step()
        expected.step()
    checkpoint.unpack_optimizer(optimizer, saved.tensors, saved.meta["optimizer"])
    scheduler.load_state_dict(saved.meta["scheduler"])
    for _ in range(5):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(fresh.param_groups[0]["lr"])
        scheduler.step()
        expected.step()
    assert (
        optimizer.param_groups[0]["weight_decay"] == 0.3
        and standings(Ledger(tmp_path / "none"), "search") == []
    )
