"""Population-based training in generations: members train a while, the worst take over weights and
settings of the best and vary them.

A member's generation is a run directory of its own that starts from a copy of another's checkpoint,
so a kill loses nothing and every part can be looked at. Settings found so are tried as constant
settings on fresh seeds: that is what best.yaml can reproduce.
"""

from __future__ import annotations

import math

from cimage_dist.errors import UserError
from cimage_dist.tune.ledger import Ledger, Trial
from cimage_dist.tune.search import draw
from cimage_dist.tune.space import Choice, Dimension, Point, Space
from cimage_dist.tune.spec import Sweep

_CHOOSE, _VARY = 3, 4  # streams of the search's seed
# Settings that may change while the weights stay.
_CHANGEABLE = (
    "optim.lr_max",
    "optim.lr_min",
    "optim.weight_decay",
    "optim.clip_norm",
    "loss.",
    "mask.",
    "ci.",
    "model.dropout",
    "model.structure_dropout",
    "model.factor_dropout",
    "model.num_layers",
    "model.routing_iterations",
    "model.routing_temperature",
    "cluster.growth",
    "sampler.hide_rate",
)


def check_space(space: Space) -> None:
    for d in space:
        if not d.key.startswith(_CHANGEABLE):
            raise UserError(
                f"space: {d.key} changes the model's shape or its data, so population-based "
                "training cannot hand weights over. Search it by asha."
            )
        decoder = {"loss.factor_weight": "factor", "loss.structure_weight": "edge"}.get(d.key)
        if decoder and 0 in d.corners():
            raise UserError(
                f"space: {d.key} reaches 0, where there is no {decoder} decoder to hand over. "
                "Let it start above 0 with scheduler: pbt."
            )


def generations(sweep: Sweep) -> list[int]:
    """Epochs at which each generation ends."""
    total = sweep.base.train.epochs
    every = sweep.settings.interval_epochs or math.ceil(total / 5)
    return [*range(every, total, every), total]


def _trial(sweep: Sweep, member: int, generation: int, values: Point, parent: str | None) -> Trial:
    name = f"p{member:04d}-g{generation:02d}"
    return Trial(
        name,
        member,
        values,
        sweep.base.run.seed + member,
        "search",
        generation,
        parent,
        generations(sweep)[generation],
    )


def first_of(sweep: Sweep, member: int, values: Point) -> Trial:
    """Members differ in seed as well."""
    return _trial(sweep, member, 0, values, None)


def next_generation(sweep: Sweep, ledger: Ledger) -> list[Trial]:
    """The members' next parts, once every member has finished the present one; empty after the last
    or while some still run.
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
    best, worst = (
        alive[:count],
        {m for m in ranked[-count:] if m not in alive[:count]}
        | {m for m in ranked if score[m] is None},
    )
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
    return {
        d.key: _vary(
            d, values[d.key], [draw(seed, _VARY, generation, member, i, j) for j in range(2)]
        )
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
