"""What a sweep leaves behind (tables, page, best.yaml, summary, the one look at test data), and
what a person sees of it under way: a table on a terminal, a line per finished trial elsewhere.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from cimage_dist.config import Config
from cimage_dist.config_loading import to_yaml
from cimage_dist.io import artifacts
from cimage_dist.pipeline.evaluation import evaluate_run
from cimage_dist.tune.ledger import (
    STAGES,
    Ledger,
    Outcome,
    Standing,
    Trial,
    spread,
    standings,
    trial_config,
)
from cimage_dist.tune.page import write_page
from cimage_dist.tune.plan import BASELINE, winner
from cimage_dist.tune.spec import Sweep

_ROWS = 18
_MOST_COLUMNS = 4
_COLOURS = {"done": "green", "stopped": "yellow", "failed": "red", "running": "cyan"}
_MARKS = {state: f"[{colour}]{state}[/]" for state, colour in _COLOURS.items()}


def rows(sweep: Sweep, ledger: Ledger) -> list[dict[str, Any]]:
    """A flat record per trial: what it was, its settings under their config keys, how it ended."""
    return [_row(sweep, ledger, trial) for trial in ledger.trials.values()]


def _row(sweep: Sweep, ledger: Ledger, trial: Trial) -> dict[str, Any]:
    found = ledger.outcomes.get(trial.id)
    about = {"trial": trial.id, "point": trial.point, "stage": trial.stage, "seed": trial.seed}
    if sweep.settings.scheduler == "pbt":
        about |= {"generation": trial.generation, "parent": trial.parent}
    values = {d.key: _plain(trial.values.get(d.key)) for d in sweep.space}
    end = {
        "status": found.status if found else "unfinished",
        "val_score": found.score if found else None,
        **{k: getattr(found, k) if found else None for k in ("epochs", "steps", "seconds")},
        "reason": found.reason if found else "",
    }
    if sweep.settings.views:
        shown = (found.views if found else None) or {}
        end |= {f"val_{name}": shown.get(name) for name in ("f1", "f2", "both")}
        end["f1_factors"] = shown.get("f1_factors")
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
    is_given = best.point == BASELINE and sweep.settings.baseline
    name = "the given settings" if is_given else f"point {best.point}"
    head = [
        f"# Winner of the sweep {sweep.name}: {name}, validation score {best.mean:.2f} ± "
        f"{best.std:.2f} on {len(best.scores)} fresh seeds.",
        f"# cimage pretrain {ledger.root}/best.yaml trains it again with the first of those seeds.",
    ]
    artifacts.write_text(ledger.root / "best.yaml", "\n".join(head) + "\n" + to_yaml(cfg))


def summary(sweep: Sweep, ledger: Ledger, test: dict[str, Any] | None = None) -> dict[str, Any]:
    """Counts, the ranking of the search, the finalists on fresh seeds, the winner and its test
    score."""
    outcomes = [ledger.outcomes.get(name) for name in ledger.trials]
    states = [found.status if found else "unfinished" for found in outcomes]
    best, search, fresh = winner(sweep, ledger), *(standings(ledger, s) for s in STAGES)
    given = [row for row in fresh if row.point == BASELINE and sweep.settings.baseline]
    failures = {t: o.reason for t, o in ledger.outcomes.items() if o.status == "failed"}
    return {
        "sweep_dir": str(ledger.root),
        "name": sweep.name,
        "trials": {n: states.count(n) for n in ("done", "stopped", "failed", "unfinished")},
        "points": len(search),
        "epochs_trained": round(sum(o.epochs for o in ledger.outcomes.values()), 1),
        "search": [describe(row) for row in search],
        "fresh": [describe(row) for row in fresh],
        "winner": describe(best) if best else None,
        "gain_over_given": _gain(best, given[0] if given else None),
        "test": test,
        "failures": failures,
    }


def describe(row: Standing) -> dict[str, Any]:
    named = {k: getattr(row, k) for k in ("point", "values", "status", "mean", "std")}
    return named | {"scores": list(row.scores)}


def _gain(best: Standing | None, base: Standing | None) -> dict[str, float] | None:
    """Mean and standard error of the winner's advantage over the given settings, seed by seed."""
    if best is None or base is None or best.point == base.point:
        return None
    if len(best.scores) != len(base.scores):
        return None
    gaps = [a - b for a, b in zip(best.scores, base.scores, strict=True)]
    mean, count = sum(gaps) / len(gaps), len(gaps)
    error = (sum((gap - mean) ** 2 for gap in gaps) / max(count - 1, 1) / count) ** 0.5
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
    looks: list[dict[str, Any]] = []
    if path.is_file():
        looks = artifacts.read_json(path, "the sweep's test scores")
    trials = [trial for trial in ledger.of("fresh") if trial.point == best.point]
    names = [trial.id for trial in trials]
    if not looks or looks[-1]["trials"] != names:
        note(f"scoring the winner, point {best.point}, on test data")
        scores: dict[str, list[float]] = {}
        for trial in trials:
            for name, value in _scores(trial_config(ledger.root, trial)).items():
                scores.setdefault(name, []).append(value)
        found = {name: {**spread(v), "scores": v} for name, v in scores.items()}
        looks.append({"point": best.point, "trials": names, "scores": found})
        artifacts.write_json(path, looks)
    return looks[-1] | {"looks": len(looks)}


def _scores(cfg: Config) -> dict[str, float]:
    """Test scores of a run by name; those it has no data for are left out."""
    short = dataclasses.replace(cfg.eval, controls=False, few_labels=[])
    result = evaluate_run(dataclasses.replace(cfg, eval=short))
    node, link = result.get("node") or {}, result.get("link") or {}
    found = {"node accuracy": node.get("test"), "link AUC": link.get("auc")}
    found["link AP"] = link.get("ap")
    return {name: float(value) for name, value in found.items() if value is not None}


def short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headings(keys: list[str]) -> list[str]:
    """One column for each setting while they fit a terminal, else one for all."""
    return [short(key) for key in keys] if len(keys) <= _MOST_COLUMNS else ["settings"]


def settings(values: dict[str, Any], keys: list[str]) -> list[str]:
    shown = [number(values.get(key)) for key in keys]
    if len(keys) <= _MOST_COLUMNS:
        return shown
    return [", ".join(f"{short(key)} {text}" for key, text in zip(keys, shown, strict=True))]


def add_columns(table: Any, names: list[str]) -> None:
    for name in names:
        is_text = name in ("trial", "state", "settings")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")


class Board:
    """Follows a sweep on standard error. Use as a context manager."""

    def __init__(self, sweep: Sweep, ledger: Ledger, quiet: bool = False) -> None:
        self.sweep, self.ledger, self.quiet = sweep, ledger, quiet
        self.is_live = not quiet and sys.stderr.isatty()
        self.latest: dict[str, dict[str, Any]] = {}
        self._began = time.monotonic()
        self._drawn = 0.0
        self._live: Any = None

    def __enter__(self) -> Board:
        if self.is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks; a live display cannot be, and a copy needs none."""
        return self.__dict__ | {"_live": None}

    def note(self, text: str) -> None:
        if self.quiet:
            return
        if self._live is not None:
            self._live.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def started(self, trial: Trial) -> None:
        self.latest[trial.id] = {}
        self._draw()

    def reported(self, trial: str, result: dict[str, Any]) -> None:
        self.latest[trial] = result
        self._draw()

    def ended(self, trial: Trial, outcome: Outcome) -> None:
        self.latest.pop(trial.id, None)
        if not self.is_live:
            score = "" if outcome.score is None else f"  val {outcome.score:.2f}"
            values = "  ".join(f"{short(key)} {number(v)}" for key, v in trial.values.items())
            reason = f"  ({outcome.reason})" if outcome.reason else ""
            done = len(self.ledger.outcomes)
            self.note(
                f"{done} over: {trial.id} {outcome.status}{score} after {outcome.epochs:g} epochs "
                f" {values}{reason}"
            )
        self._draw(is_forced=True)

    def _draw(self, is_forced: bool = False) -> None:
        if self._live is None or (not is_forced and time.monotonic() - self._drawn < 0.5):
            return
        self._drawn = time.monotonic()
        self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.table import Table

        keys = [d.key for d in self.sweep.space]
        ended = [row for row in standings(self.ledger, "search") if row.status != "running"]
        scored = [row for row in ended if row.mean is not None]
        best = f", best {scored[0].mean:.2f} (point {scored[0].point})" if scored else ""
        states = f"{len(self.ledger.outcomes)} trials over, {len(self.latest)} running{best}"
        table = Table(title=f"{self.sweep.name}: {states}", title_justify="left")
        add_columns(table, ["trial", "epoch", "val score", "state", *headings(keys)])
        over = [trial for trial in self.ledger.trials.values() if trial.id in self.ledger.outcomes]
        running = [self.ledger.trials[name] for name in self.latest]
        for trial in [*over[-max(1, _ROWS - len(self.latest)) :], *running]:
            found = self.ledger.outcomes.get(trial.id)
            now = self.latest.get(trial.id, {})
            given = (found.epochs, found.score) if found else (now.get("epoch"), now.get("score"))
            shown = ["-" if value is None else number(float(value)) for value in given]
            state = _MARKS[found.status if found else "running"]
            table.add_row(trial.id, *shown, state, *settings(trial.values, keys))
        return table


def print_summary(result: dict[str, Any], keys: list[str]) -> None:
    """Ranking of the search, finalists, winner and its test score, on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    titles = ("search: validation score", "finalists on fresh seeds: validation score")
    for stage, title in zip(STAGES, titles, strict=True):
        if not result[stage]:
            continue
        table = Table(title=title, title_justify="left")
        add_columns(table, ["point", "mean", "± std", "seeds", "state", *headings(keys)])
        for row in result[stage][:15]:
            mean = "-" if row["mean"] is None else f"{row['mean']:.2f}"
            spread_of = (mean, f"{row['std']:.2f}", str(len(row["scores"])), _MARKS[row["status"]])
            table.add_row(str(row["point"]), *spread_of, *settings(row["values"], keys))
        console.print(table)
    counts = result["trials"]
    states = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [f"{states}; {result['epochs_trained']:g} epochs in all"]
    lines += [f"failed: {trial}: {reason}" for trial, reason in result["failures"].items()]
    won = result["winner"]
    if won is None:
        why = ": sweep.top is 0, or no finalist finished on every fresh seed"
        lines.append("no winner named" + ("" if counts["unfinished"] else why))
    else:
        lines.append(
            f"winner: point {won['point']}, validation {won['mean']:.2f} ± {won['std']:.2f} on "
            f"{len(won['scores'])} fresh seeds"
        )
        if gain := result["gain_over_given"]:
            lines.append(
                f"  over the given settings, seed by seed: {gain['mean']:+.2f} ± "
                f"{gain['standard_error']:.2f} (standard error)"
            )
        if test := result["test"]:
            rows = test["scores"].items()
            shown = ", ".join(f"{name} {row['mean']:.2f} ± {row['std']:.2f}" for name, row in rows)
            lines.append(f"  test, read once for the winner: {shown}")
        lines.append(f"next: cimage pretrain {result['sweep_dir']}/best.yaml")
    lines.append(f"results: {result['sweep_dir']}/index.html, results.csv, results.parquet")
    for line in lines:
        console.print(line, highlight=False, markup=False)
