"""The end of a sweep: tables and page, the winner's config, and the one look at the test data."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from cimage_dist.config import Config
from cimage_dist.io import artifacts
from cimage_dist.pipeline.evaluation import evaluate_run
from cimage_dist.tune.checks import winner
from cimage_dist.tune.ledger import Ledger, Standing
from cimage_dist.tune.page import write_page
from cimage_dist.tune.results import summary, write_best, write_tables
from cimage_dist.tune.spec import Sweep
from cimage_dist.tune.trial import trial_config


def write_pages(sweep: Sweep, ledger: Ledger, test: dict[str, Any] | None = None) -> dict[str, Any]:
    found = summary(sweep, ledger, test)
    write_tables(sweep, ledger)
    write_page(sweep, ledger, found)
    artifacts.write_json(ledger.root / "summary.json", found)
    return found


def finish(sweep: Sweep, ledger: Ledger, note: Callable[[str], None]) -> dict[str, Any]:
    """Name the winner, write its config, score its fresh runs on test data once, write everything
    down.
    """
    best = winner(sweep, ledger)
    if best is None:
        return write_pages(sweep, ledger)
    write_best(sweep, ledger, best)
    return write_pages(sweep, ledger, _test_scores(ledger, best, note))


def _test_scores(ledger: Ledger, best: Standing, note: Callable[[str], None]) -> dict[str, Any]:
    """Mean and standard deviation over the winner's fresh runs; kept in test.json, and never
    computed twice for the same winner.

    A search that continues with a larger budget may name another winner; then the earlier look
    stays on record.
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
