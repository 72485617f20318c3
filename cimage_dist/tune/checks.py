"""What runs next, from the ledger alone: the search within its budgets, then the best points on
fresh seeds.
"""

from __future__ import annotations

from typing import Literal

from cimage_dist.tune import population
from cimage_dist.tune.ledger import Ledger, Stage, Standing, Trial, standings
from cimage_dist.tune.search import grid, suggest
from cimage_dist.tune.space import Point, value_of
from cimage_dist.tune.spec import Sweep

BASELINE = 0  # the point that is the given config, where it is tried


class Plan:
    """Hands out trials. `running` are those under way now; unfinished ones of an earlier command
    are handed out again.
    """

    def __init__(self, sweep: Sweep, ledger: Ledger) -> None:
        self.sweep, self.ledger = sweep, ledger
        self.running: set[str] = set()

    def next(self, elapsed: float) -> Trial | Literal["wait"] | None:
        """The next trial; "wait" where the running ones must end first; None when all is done."""
        for stage in ("search", "fresh"):
            trial = self._next_of(stage, elapsed)
            if trial == "wait":
                return "wait"
            if trial is not None:
                self.running.add(trial.id)
                return trial
        return None

    def _next_of(self, stage: Stage, elapsed: float) -> Trial | Literal["wait"] | None:
        self._complete_points(stage)
        left = self.ledger.unfinished(stage)
        if waiting := [trial for trial in left if trial.id not in self.running]:
            return waiting[0]
        made = self._new_search_trials(elapsed) if stage == "search" else self._new_fresh_trials()
        for trial in made:
            self.ledger.add(trial)
        if made:
            return made[0]
        return "wait" if left else None

    def _complete_points(self, stage: Stage) -> None:
        """A kill between the writing of two seeds of a point leaves it with fewer; the search's
        missing ones are added.
        """
        if stage != "search" or self.sweep.settings.scheduler == "pbt":
            return
        known = {(trial.point, trial.seed) for trial in self.ledger.of("search")}
        for point, values in self.ledger.points().items():
            for trial in self._seeds_of(point, values):
                if (point, trial.seed) not in known:
                    self.ledger.add(trial)

    def _seeds_of(self, point: int, values: Point) -> list[Trial]:
        first = self.sweep.base.run.seed
        return [
            Trial(f"p{point:04d}-s{seed}", point, values, seed)
            for seed in range(first, first + self.sweep.settings.seeds)
        ]

    def _new_search_trials(self, elapsed: float) -> list[Trial]:
        settings, space = self.sweep.settings, self.sweep.space
        history = standings(self.ledger, "search")
        is_population = settings.scheduler == "pbt"
        if is_population and len(history) >= (settings.trials or 20):
            return population.next_generation(self.sweep, self.ledger)
        if self._is_spent(len(history), elapsed):
            return []
        # A population keeps the given config's number free: its members change their settings on
        # the way.
        number = len(history) + (1 if is_population and settings.baseline else 0)
        if number == BASELINE and settings.baseline:
            return self._seeds_of(number, self._given())
        values = suggest(
            settings.search, space, settings.seed, number, history, self.sweep.is_valid
        )
        if values is None:
            return []
        return (
            [population.first_of(self.sweep, number, values)]
            if is_population
            else self._seeds_of(number, values)
        )

    def _given(self) -> Point:
        return {d.key: value_of(self.sweep.base, d.key) for d in self.sweep.space}

    def _is_spent(self, count: int, elapsed: float) -> bool:
        settings = self.sweep.settings
        most = settings.trials or (
            len(grid(self.sweep.space)) + settings.baseline if settings.search == "grid" else 20
        )
        if count >= most or (settings.time_s is not None and elapsed >= settings.time_s):
            return True
        if settings.epochs is None:
            return False
        trained = (
            sum(o.epochs for o in self.ledger.outcomes.values())
            + len(self.ledger.unfinished("search")) * self.sweep.base.train.epochs
        )
        return trained >= settings.epochs

    def _new_fresh_trials(self) -> list[Trial]:
        """Seeds that the search has not seen, the same for every finalist, so that they compare
        pairwise.
        """
        settings, first = self.sweep.settings, self.sweep.base.run.seed + self.sweep.settings.seeds
        known = {(trial.point, trial.seed) for trial in self.ledger.of("fresh")}
        return [
            Trial(f"p{row.point:04d}-fresh-s{seed}", row.point, row.values, seed, "fresh")
            for seed in range(first, first + settings.fresh_seeds)
            for row in self.finalists()
            if (row.point, seed) not in known
        ]

    def finalists(self) -> list[Standing]:
        """The best points of the search, and the given config beside them."""
        settings = self.sweep.settings
        rows = [
            row
            for row in standings(self.ledger, "search")
            if row.status in ("done", "stopped") and row.mean is not None
        ]
        kept = _different(rows)[: settings.top]
        if kept and settings.baseline and not any(row.point == BASELINE for row in kept):
            kept.append(Standing(BASELINE, self._given(), "done", (), 0.0))
        return kept


def _different(rows: list[Standing]) -> list[Standing]:
    """Population-based training may leave several members with equal settings."""
    kept: list[Standing] = []
    for row in rows:
        if all(row.values != other.values for other in kept):
            kept.append(row)
    return kept


def winner(sweep: Sweep, ledger: Ledger) -> Standing | None:
    """The finalist with the best mean validation score on the fresh seeds; None before they are
    done.
    """
    rows = [
        row
        for row in standings(ledger, "fresh")
        if row.status == "done" and len(row.scores) >= sweep.settings.fresh_seeds
    ]
    return rows[0] if rows and not ledger.unfinished("fresh") else None
