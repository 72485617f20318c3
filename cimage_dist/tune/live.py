"""What a person sees of a sweep under way.

A table on a terminal, a line per finished trial elsewhere, nothing when quiet.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from cimage_dist.tune.ledger import Ledger, Outcome, Trial, standings
from cimage_dist.tune.spec import Sweep

_ROWS = 18
_MOST_COLUMNS = 4
_MARKS = {
    "done": "[green]done[/]",
    "stopped": "[yellow]stopped[/]",
    "failed": "[red]failed[/]",
    "running": "[cyan]running[/]",
}


def short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headings(keys: list[str]) -> list[str]:
    """One column for each setting while they fit a terminal, else one for all."""
    return [short(key) for key in keys] if len(keys) <= _MOST_COLUMNS else ["settings"]


def settings(values: dict[str, Any], keys: list[str]) -> list[str]:
    shown = [number(values.get(key)) for key in keys]
    return (
        shown
        if len(keys) <= _MOST_COLUMNS
        else [", ".join(f"{short(key)} {text}" for key, text in zip(keys, shown, strict=True))]
    )


def add_columns(table: Any, names: list[str]) -> None:
    for name in names:
        table.add_column(
            name,
            justify="left" if name in ("trial", "state", "settings") else "right",
            overflow="fold",
        )


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
            values = "  ".join(
                f"{short(key)} {number(value)}" for key, value in trial.values.items()
            )
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
        rows = [
            row
            for row in standings(self.ledger, "search")
            if row.mean is not None and row.status != "running"
        ]
        best = f", best {rows[0].mean:.2f} (point {rows[0].point})" if rows else ""
        table = Table(
            title=f"{self.sweep.name}: {len(self.ledger.outcomes)} trials over, "
            f"{len(self.latest)} running{best}",
            title_justify="left",
        )
        add_columns(table, ["trial", "epoch", "val score", "state", *headings(keys)])
        over = [trial for trial in self.ledger.trials.values() if trial.id in self.ledger.outcomes]
        for trial in [
            *over[-max(1, _ROWS - len(self.latest)) :],
            *[self.ledger.trials[name] for name in self.latest],
        ]:
            found = self.ledger.outcomes.get(trial.id)
            now = self.latest.get(trial.id, {})
            score, epoch = (
                (found.score, found.epochs) if found else (now.get("score"), now.get("epoch"))
            )
            shown = ["-" if value is None else number(float(value)) for value in (epoch, score)]
            table.add_row(
                trial.id,
                *shown,
                _MARKS[found.status if found else "running"],
                *settings(trial.values, keys),
            )
        return table


def print_summary(result: dict[str, Any], keys: list[str]) -> None:
    """Ranking of the search, finalists, winner and its test score, on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for stage, title in (
        ("search", "search: validation score"),
        ("fresh", "finalists on fresh seeds: validation score"),
    ):
        if not result[stage]:
            continue
        table = Table(title=title, title_justify="left")
        add_columns(table, ["point", "mean", "± std", "seeds", "state", *headings(keys)])
        for row in result[stage][:15]:
            mean = "-" if row["mean"] is None else f"{row['mean']:.2f}"
            table.add_row(
                str(row["point"]),
                mean,
                f"{row['std']:.2f}",
                str(len(row["scores"])),
                _MARKS[row["status"]],
                *settings(row["values"], keys),
            )
        console.print(table)
    counts = result["trials"]
    lines = [
        ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        + f"; {result['epochs_trained']:g} epochs in all"
    ]
    lines += [f"failed: {trial}: {reason}" for trial, reason in result["failures"].items()]
    won = result["winner"]
    if won is None:
        lines.append(
            "no winner named"
            + (
                ""
                if counts["unfinished"]
                else ": sweep.top is 0, or no finalist finished on every fresh seed"
            )
        )
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
            shown = ", ".join(
                f"{name} {row['mean']:.2f} ± {row['std']:.2f}"
                for name, row in test["scores"].items()
            )
            lines.append(f"  test, read once for the winner: {shown}")
        lines.append(f"next: cimage pretrain {result['sweep_dir']}/best.yaml")
    lines.append(f"results: {result['sweep_dir']}/index.html, results.csv, results.parquet")
    for line in lines:
        console.print(line, highlight=False, markup=False)
