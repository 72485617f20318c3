"""What runs next, from the ledger alone: the search within its budgets, then fresh seeds.

Population-based training goes in generations: members train a while, the worst take over weights
and settings of the best and vary them. A member's generation is a run directory of its own that
starts from a copy of another's checkpoint, so a kill loses nothing and every part can be looked at.
Settings found so are tried as constant settings on fresh seeds, which best.yaml can reproduce.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Literal

from cimage_dist.config import OptimConfig
from cimage_dist.io import artifacts, checkpoint
from cimage_dist.io.artifacts import RunDir
from cimage_dist.tune import Choice, Dimension, Point, Space, value_of
from cimage_dist.tune.ledger import Ledger, Stage, Standing, Trial, standings
from cimage_dist.tune.search import draw, grid, suggest
from cimage_dist.tune.spec import Sweep

BASELINE = 0  # the point that is the given config, where it is tried


class Plan:
    """Hands out trials. `running` are those under way now.

    Unfinished ones of an earlier command are handed out again.
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
        """A kill between the writing of two seeds of a point leaves it with fewer.

        The search's missing ones are added.
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
            return next_generation(self.sweep, self.ledger)
        if self._is_spent(len(history), elapsed):
            return []
        # A population keeps the given config's number free: its members change their settings on
        # the way.
        number = len(history) + (1 if is_population and settings.baseline else 0)
        if number == BASELINE and settings.baseline:
            return self._seeds_of(number, self._given())
        where = (space, settings.seed, number, history)
        values = suggest(settings.search, *where, self.sweep.is_valid)
        if values is None:
            return []
        if is_population:
            return [first_of(self.sweep, number, values)]
        return self._seeds_of(number, values)

    def _given(self) -> Point:
        return {d.key: value_of(self.sweep.base, d.key) for d in self.sweep.space}

    def _is_spent(self, count: int, elapsed: float) -> bool:
        settings, most = self.sweep.settings, self.sweep.settings.trials or 20
        if not settings.trials and settings.search == "grid":
            most = len(grid(self.sweep.space)) + settings.baseline
        if count >= most or (settings.time_s is not None and elapsed >= settings.time_s):
            return True
        if settings.epochs is None:
            return False
        trained = sum(o.epochs for o in self.ledger.outcomes.values())
        running = len(self.ledger.unfinished("search")) * self.sweep.base.epochs
        return trained + running >= settings.epochs

    def _new_fresh_trials(self) -> list[Trial]:
        """Seeds that the search has not seen, the same for every finalist, so that they compare
        pairwise."""
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
        settings, rows = self.sweep.settings, standings(self.ledger, "search")
        rows = [r for r in rows if r.status in ("done", "stopped") and r.mean is not None]
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
    """The finalist with the best mean validation score on the fresh seeds.

    None before they are done.
    """
    rows, seeds = standings(ledger, "fresh"), sweep.settings.fresh_seeds
    rows = [row for row in rows if row.status == "done" and len(row.scores) >= seeds]
    return rows[0] if rows and not ledger.unfinished("fresh") else None


_CHOOSE, _VARY = 3, 4  # streams of the search's seed


def generations(sweep: Sweep) -> list[int]:
    """Epochs at which each generation ends."""
    total = sweep.base.epochs
    every = sweep.settings.interval_epochs or math.ceil(total / 5)
    return [*range(every, total, every), total]


def _trial(sweep: Sweep, member: int, generation: int, values: Point, parent: str | None) -> Trial:
    name, seed = f"p{member:04d}-g{generation:02d}", sweep.base.run.seed + member
    until = generations(sweep)[generation]
    return Trial(name, member, values, seed, "search", generation, parent, until)


def first_of(sweep: Sweep, member: int, values: Point) -> Trial:
    """Members differ in seed as well."""
    return _trial(sweep, member, 0, values, None)


def next_generation(sweep: Sweep, ledger: Ledger) -> list[Trial]:
    """The members' next parts, once every member has finished the present one.

    Empty after the last or while some still run.
    """
    present = max(trial.generation for trial in ledger.of("search"))
    trials = [trial for trial in ledger.of("search") if trial.generation == present]
    members = sorted({trial.point for trial in ledger.of("search")})
    if len(trials) < len(members):  # a kill came while this generation was written
        return _made(sweep, ledger, present, members)
    if ledger.unfinished("search") or present + 1 >= len(generations(sweep)):
        return []
    return _made(sweep, ledger, present + 1, members)


def _made(sweep: Sweep, ledger: Ledger, generation: int, members: list[int]) -> list[Trial]:
    before = {t.point: t for t in ledger.of("search") if t.generation == generation - 1}
    score = {m: ledger.outcomes[t.id].score for m, t in before.items()}
    ranked = sorted(members, key=lambda m: (score[m] is None, -(score[m] or 0.0), m))
    alive = [m for m in ranked if score[m] is not None]
    if not alive:
        return []
    count = math.ceil(len(members) * sweep.settings.quantile)
    best = alive[:count]
    worst = {m for m in ranked if score[m] is None} | {m for m in ranked[-count:] if m not in best}
    seed, made = sweep.settings.seed, []
    known = {(t.point, t.generation) for t in ledger.of("search")}
    for member in members:
        if (member, generation) in known:
            continue
        values, source = before[member].values, member
        if member in worst:
            source = best[int(draw(seed, _CHOOSE, generation, member) * len(best))]
            other = varied(sweep.space, before[source].values, seed, generation, member)
            values = other if sweep.is_valid(other) else before[source].values
        made.append(_trial(sweep, member, generation, values, before[source].id))
    return made


def varied(space: Space, values: Point, seed: int, generation: int, member: int) -> Point:
    """Numbers times 0.8 or 1.25, ordered choices to a neighbour; one key in four is drawn again."""
    key = (seed, _VARY, generation, member)
    return {
        d.key: _vary(d, values[d.key], [draw(*key, i, j) for j in range(2)])
        for i, d in enumerate(space)
    }


def _vary(d: Dimension, value: object, u: list[float]) -> object:
    if u[0] < 0.25 or d.position(value) is None:
        return d.at(u[1])
    up = u[1] < 0.5
    if isinstance(d, Choice):
        if not d.is_ordered:
            return value
        return d.values[min(max(d.values.index(value) + (1 if up else -1), 0), len(d.values) - 1)]
    assert isinstance(value, int | float)
    if d.is_int:
        return d.clip(max(value + 1, value * 1.25) if up else min(value - 1, value * 0.8))
    return d.clip(value * (1.25 if up else 0.8))


def hand_over(source: Path, target: Path, optim: OptimConfig) -> None:
    """Copy the newest checkpoint of `source`, the best one, its pseudo-labels and its records into
    `target`; once.

    The checkpoint carries the optimiser's settings, so they are replaced by those of `optim`.
    """
    old, new, done = RunDir(source), RunDir(target), target / "handover.json"
    if done.is_file():
        return
    saved = checkpoint.load_selected(old.checkpoints, "last")
    best = checkpoint.load_selected(old.checkpoints, "val")
    for folder in sorted(source.iterdir()):
        if folder.is_dir() and (folder / artifacts.MANIFEST).is_file() and folder != old.embeddings:
            with artifacts.committed_dir(target / folder.name) as tmp:
                shutil.copytree(folder, tmp, dirs_exist_ok=True)
    if old.metrics.is_file():
        artifacts.write_bytes(new.metrics, old.metrics.read_bytes())
    checkpoint.save(new.checkpoints, best.step, best.tensors, best.meta)
    checkpoint.point(new.checkpoints, "BEST", best.step)
    checkpoint.save(new.checkpoints, saved.step, saved.tensors, _with_settings(saved.meta, optim))
    artifacts.write_json(done, {"from": source.name, "step": saved.step})


def _with_settings(meta: dict[str, Any], optim: OptimConfig) -> dict[str, Any]:
    """The cosine's place in its period stays; its ends are the new ones.

    Without restarts the rate is a function of the step, which training sets when it continues.
    """
    count = len(meta["scheduler"]["base_lrs"])
    schedule = meta["scheduler"] | {"base_lrs": [optim.lr_max] * count}
    fixed = {"initial_lr": optim.lr_max, "weight_decay": optim.weight_decay}
    if optim.schedule == "cosine":
        groups = [group | fixed for group in meta["optimizer"]]
        return meta | {"scheduler": schedule, "optimizer": groups}
    schedule["eta_min"] = optim.lr_min
    share = (1 + math.cos(math.pi * schedule["T_cur"] / schedule["T_i"])) / 2
    now = optim.lr_min + (optim.lr_max - optim.lr_min) * share
    groups = [group | fixed | {"lr": now} for group in meta["optimizer"]]
    return meta | {"scheduler": schedule | {"_last_lr": [now] * len(groups)}, "optimizer": groups}
