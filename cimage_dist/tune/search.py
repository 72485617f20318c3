"""The next point to try, as a function of the space, the points so far and their number.

Nothing is remembered between calls.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.tune import Choice, Dimension, Point, Space
from cimage_dist.tune.ledger import Standing

_DRAW, _TPE = 1, 2  # streams of the search's seed
_TRIES = 200
_FEWEST = 6  # points from which importance is computed


def draw(seed: int, *keys: int) -> float:
    """In [0, 1)."""
    return (keyed.derive(seed, *keys) & (2**53 - 1)) / 2**53


def grid(space: Space) -> list[Point]:
    """Every combination, the last key running fastest."""
    for dimension in space:
        if not isinstance(dimension, Choice):
            raise UserError(
                f"space: {dimension.key} is a range, and search: grid needs lists of choices. Use "
                "search: random or tpe, or list its values."
            )
    return [
        dict(zip([d.key for d in space], values, strict=True))
        for values in itertools.product(*[d.corners() for d in space])
    ]


def random_point(space: Space, seed: int, number: int, attempt: int = 0) -> Point:
    return {d.key: d.at(draw(seed, _DRAW, number, attempt, i)) for i, d in enumerate(space)}


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
