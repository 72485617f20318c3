"""What runs next, from the ledger alone: the next point of the search within its budgets, then
fresh seeds. Nothing is remembered between calls.

Population-based training goes in generations: members train a while, the worst take over weights
and settings of the best and vary them. A member's generation is a run directory of its own that
starts from a copy of another's checkpoint, so a kill loses nothing and every part can be looked at.
Settings found so are tried as constant settings on fresh seeds, which best.yaml can reproduce.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.tune import Choice, Dimension, Point, Space, draw, grid, random_point, value_of
from cimage_dist.tune.ledger import Ledger, Stage, Standing, Trial, standings
from cimage_dist.tune.spec import Sweep

_TPE = 2  # stream of the search's seed
_TRIES = 200
_FEWEST = 6  # points from which importance is computed


def suggest(
    search: str,
    space: Space,
    seed: int,
    number: int,
    history: Sequence[Standing],
    is_valid: Callable[[Point], bool] = lambda point: True,
) -> Point | None:
    """The point `number`, valid and unlike all before; None when the space has no other."""
    seen = {_name(row.values) for row in history}

    def is_good(point: Point) -> bool:
        return _name(point) not in seen and is_valid(point)

    if search == "grid":
        return next(filter(is_good, grid(space)), None)
    if search == "tpe" and is_good(point := _tpe(space, seed, number, history)):
        return point
    drawn = (random_point(space, seed, number, attempt) for attempt in range(_TRIES))
    return next(filter(is_good, drawn), None)


def _name(point: Point) -> str:
    return json.dumps(point, sort_keys=True)


def _tpe(space: Space, seed: int, number: int, history: Sequence[Standing]) -> Point:
    """A tree-structured Parzen estimator (Optuna's) shown the whole history again, so that a killed
    search needs no state of its own."""
    try:
        import optuna
    except ImportError:
        raise UserError(
            "search: tpe needs optuna: pip install 'cimage-dist[tune]'. Or use search: random."
        ) from None
    # Univariate and with running points counted as bad ones: several trials run at a time.
    sampler = optuna.samplers.TPESampler(
        seed=keyed.derive(seed, _TPE, number) & (2**31 - 1),
        n_startup_trials=max(5, 2 * len(space)),
        constant_liar=True,
    )
    states = optuna.trial.TrialState

    def facts(row: Standing) -> dict[str, Any]:
        if row.status == "done":
            return {"value": row.mean}
        if row.status == "running":
            return {"state": states.RUNNING}
        # A failed one counts as stopped at once.
        score = row.mean if row.status == "stopped" and row.mean is not None else 0.0
        at = int(row.epochs) if row.status == "stopped" else 0
        return {"state": states.PRUNED, "intermediate_values": {at: score}}

    study = _study(space, [(row, facts(row)) for row in history], sampler)
    asked = study.ask(fixed_distributions={d.key: _distribution(d) for d in space})
    return {d.key: _decode(d, asked.params[d.key]) for d in space}


def importance(space: Space, rows: Sequence[Standing]) -> dict[str, float]:
    """Share of each key in the variance of the scores, by Optuna's fANOVA; they sum to 1.

    Empty where there are too few points or all scores are equal.
    """
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    scored = [row for row in rows if row.status in ("done", "stopped") and row.mean is not None]
    study = _study(space, [(row, {"value": row.mean}) for row in scored])
    if len(study.trials) < _FEWEST or len({trial.value for trial in study.trials}) == 1:
        return {}
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0))


def _study(
    space: Space, rows: Sequence[tuple[Standing, dict[str, Any]]], sampler: Any = None
) -> Any:
    """Optuna's study of points, each with what is known of it; points outside the space (the given
    config may be one) are left out.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    shapes = {d.key: _distribution(d) for d in space}
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for row, facts in rows:
        params = {d.key: _encode(d, row.values.get(d.key)) for d in space}
        if None not in params.values():
            trial = optuna.trial.create_trial(params=params, distributions=shapes, **facts)
            study.add_trial(trial)
    return study


def _distribution(d: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(d, Choice):
        if d.is_ordered and len(d.values) > 1:
            return IntDistribution(0, len(d.values) - 1)
        return CategoricalDistribution(list(range(len(d.values))))
    if d.is_int:
        return IntDistribution(int(d.low), int(d.high), log=d.is_log)
    return FloatDistribution(d.low, d.high, log=d.is_log)


def _encode(d: Dimension, value: Any) -> Any:
    if d.position(value) is None:
        return None
    return d.values.index(value) if isinstance(d, Choice) else value


def _decode(d: Dimension, value: Any) -> Any:
    return d.values[value] if isinstance(d, Choice) else d.clip(value)


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
