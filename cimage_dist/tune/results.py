"""What a sweep leaves behind: results.csv and results.parquet (a row per trial), best.yaml, and a
summary.
"""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

from cimage_dist.config_loading import to_yaml
from cimage_dist.io import artifacts
from cimage_dist.tune.checks import BASELINE, winner
from cimage_dist.tune.ledger import Ledger, Standing, Trial, standings
from cimage_dist.tune.spec import Sweep


def rows(sweep: Sweep, ledger: Ledger) -> list[dict[str, Any]]:
    """A flat record per trial: what it was, its settings under their config keys, how it ended."""
    return [_row(sweep, ledger, trial) for trial in ledger.trials.values()]


def _row(sweep: Sweep, ledger: Ledger, trial: Trial) -> dict[str, Any]:
    found = ledger.outcomes.get(trial.id)
    about = {"trial": trial.id, "point": trial.point, "stage": trial.stage, "seed": trial.seed}
    if sweep.settings.scheduler == "pbt":
        about |= {"generation": trial.generation, "parent": trial.parent}
    values = {d.key: _plain(trial.values.get(d.key)) for d in sweep.space}
    end: dict[str, Any] = {
        "status": "unfinished",
        "val_score": None,
        "epochs": None,
        "steps": None,
        "seconds": None,
        "reason": "",
    }
    if found is not None:
        end = {
            "status": found.status,
            "val_score": found.score,
            "epochs": found.epochs,
            "steps": found.steps,
            "seconds": found.seconds,
            "reason": found.reason,
        }
    if sweep.settings.views:
        shown = (found.views if found else None) or {}
        end |= {
            "val_f1": shown.get("f1"),
            "val_f2": shown.get("f2"),
            "val_both": shown.get("both"),
            "f1_factors": shown.get("f1_factors"),
        }
    return about | values | end


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list) else value


def write_tables(sweep: Sweep, ledger: Ledger) -> None:
    import pandas as pd

    table = pd.DataFrame(rows(sweep, ledger))
    artifacts.write_text(ledger.root / "results.csv", table.to_csv(index=False))
    for d in sweep.space:
        if d.key in table and table[d.key].map(type).nunique() > 1:
            table[d.key] = table[d.key].map(str)  # a parquet column has one type
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    artifacts.write_bytes(ledger.root / "results.parquet", buffer.getvalue())


def write_best(sweep: Sweep, ledger: Ledger, best: Standing) -> None:
    """The winner as a config of its own: training it from anywhere gives the winner's first fresh
    run again.
    """
    cfg = sweep.config(best.values)
    first = sweep.base.run.seed + sweep.settings.seeds
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, seed=first, dir=None))
    name = (
        "the given settings"
        if best.point == BASELINE and sweep.settings.baseline
        else f"point {best.point}"
    )
    head = [
        f"# Winner of the sweep {sweep.name}: {name}, validation score {best.mean:.2f} ± "
        f"{best.std:.2f} on {len(best.scores)} fresh seeds.",
        f"# cimage pretrain {ledger.root}/best.yaml trains it again with the first of those seeds.",
    ]
    artifacts.write_text(ledger.root / "best.yaml", "\n".join(head) + "\n" + to_yaml(cfg))


def summary(sweep: Sweep, ledger: Ledger, test: dict[str, Any] | None = None) -> dict[str, Any]:
    """Counts, the ranking of the search, the finalists on fresh seeds, the winner and its test
    score.
    """
    states = [
        ledger.outcomes[t.id].status if t.id in ledger.outcomes else "unfinished"
        for t in ledger.trials.values()
    ]
    best = winner(sweep, ledger)
    fresh = standings(ledger, "fresh")
    base = (
        next((row for row in fresh if row.point == BASELINE), None)
        if sweep.settings.baseline
        else None
    )
    failures = {t: o.reason for t, o in ledger.outcomes.items() if o.status == "failed"}
    return {
        "sweep_dir": str(ledger.root),
        "name": sweep.name,
        "trials": {
            name: states.count(name) for name in ("done", "stopped", "failed", "unfinished")
        },
        "points": len(standings(ledger, "search")),
        "epochs_trained": round(sum(o.epochs for o in ledger.outcomes.values()), 1),
        "search": [describe(row) for row in standings(ledger, "search")],
        "fresh": [describe(row) for row in fresh],
        "winner": describe(best) if best else None,
        "gain_over_given": _gain(best, base),
        "test": test,
        "failures": failures,
    }


def describe(row: Standing) -> dict[str, Any]:
    return {
        "point": row.point,
        "values": row.values,
        "status": row.status,
        "mean": row.mean,
        "std": row.std,
        "scores": list(row.scores),
    }


def _gain(best: Standing | None, base: Standing | None) -> dict[str, float] | None:
    """Mean and standard error of the winner's advantage over the given settings, seed by seed."""
    if (
        best is None
        or base is None
        or best.point == base.point
        or len(best.scores) != len(base.scores)
    ):
        return None
    gaps = [a - b for a, b in zip(best.scores, base.scores, strict=True)]
    mean = sum(gaps) / len(gaps)
    error = (
        (sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps)) ** 0.5
        if len(gaps) > 1
        else 0.0
    )
    return {"mean": mean, "standard_error": error}
