"""What a sweep leaves behind: tables, page, best.yaml, summary, and the one look at test data."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
from collections.abc import Callable
from typing import Any

from cimage_dist.config import Config
from cimage_dist.config_loading import to_yaml
from cimage_dist.io import artifacts
from cimage_dist.pipeline.evaluation import evaluate_run
from cimage_dist.tune.ledger import Ledger, Standing, Trial, standings, trial_config
from cimage_dist.tune.page import write_page
from cimage_dist.tune.plan import BASELINE, winner
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
    """The winner as a config of its own.

    Training it from anywhere gives the winner's first fresh run again.
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
    score."""
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


def write_pages(sweep: Sweep, ledger: Ledger, test: dict[str, Any] | None = None) -> dict[str, Any]:
    found = summary(sweep, ledger, test)
    write_tables(sweep, ledger)
    write_page(sweep, ledger, found)
    artifacts.write_json(ledger.root / "summary.json", found)
    return found


def finish(sweep: Sweep, ledger: Ledger, note: Callable[[str], None]) -> dict[str, Any]:
    """Name the winner, write its config, score its fresh runs on test data once, write everything
    down."""
    best = winner(sweep, ledger)
    if best is None:
        return write_pages(sweep, ledger)
    write_best(sweep, ledger, best)
    return write_pages(sweep, ledger, _test_scores(ledger, best, note))


def _test_scores(ledger: Ledger, best: Standing, note: Callable[[str], None]) -> dict[str, Any]:
    """Mean and standard deviation over the winner's fresh runs; kept in test.json, and never
    computed twice for the same winner.

    A search continued with a larger budget may name another winner; then the earlier look stays
    on record.
    """
    path = ledger.root / "test.json"
    looks: list[dict[str, Any]] = (
        artifacts.read_json(path, "the sweep's test scores") if path.is_file() else []
    )
    trials = [trial for trial in ledger.of("fresh") if trial.point == best.point]
    names = [trial.id for trial in trials]
    if not looks or looks[-1]["trials"] != names:
        note(f"scoring the winner, point {best.point}, on test data")
        scores: dict[str, list[float]] = {}
        for trial in trials:
            for name, value in _scores(trial_config(ledger.root, trial)).items():
                scores.setdefault(name, []).append(value)
        rows = {
            name: {
                "mean": statistics.fmean(v),
                "std": statistics.stdev(v) if len(v) > 1 else 0.0,
                "scores": v,
            }
            for name, v in scores.items()
        }
        looks.append({"point": best.point, "trials": names, "scores": rows})
        artifacts.write_json(path, looks)
    return looks[-1] | {"looks": len(looks)}


def _scores(cfg: Config) -> dict[str, float]:
    """Test scores of a run by name; those it has no data for are left out."""
    result = evaluate_run(
        dataclasses.replace(cfg, eval=dataclasses.replace(cfg.eval, controls=False, few_labels=[]))
    )
    found = {"node accuracy": (result.get("node") or {}).get("test")}
    found |= {
        f"link {name.upper()}": (result.get("link") or {}).get(name) for name in ("auc", "ap")
    }
    return {name: float(value) for name, value in found.items() if value is not None}
