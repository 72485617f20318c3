"""Which settings mattered: the spread of a forest's mean prediction along each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cimage_dist.tune.ledger import Standing
from cimage_dist.tune.space import Choice, Space

_FEWEST = 6
_STEPS = 12


def importance(space: Space, rows: Sequence[Standing]) -> dict[str, float]:
    """Share of each key in the summed main effects (they sum to 1); empty where there are too few
    whole points or all scores are equal.

    A random forest predicts the score from the settings. The main effect of a key is the variance,
    over values v of that key, of the mean prediction over all points with the key set to v: the
    first-order term of a functional analysis of variance.
    """
    from sklearn.ensemble import RandomForestRegressor

    kept = [row for row in rows if row.status in ("done", "stopped") and row.mean is not None]
    if len(kept) < _FEWEST:
        return {}
    y = np.array([row.mean for row in kept], float)
    blocks = [_encode(d, [row.values.get(d.key) for row in kept]) for d in space]
    x = np.concatenate(blocks, axis=1)
    forest = RandomForestRegressor(100, random_state=0, min_samples_leaf=2, n_jobs=1).fit(x, y)
    effects, begin = {}, 0
    for d, block in zip(space, blocks, strict=True):
        means = []
        for value in _spread(block):
            changed = x.copy()
            changed[:, begin : begin + block.shape[1]] = value
            means.append(forest.predict(changed).mean())
        effects[d.key] = float(np.var(means))
        begin += block.shape[1]
    total = sum(effects.values())
    return {key: effect / total for key, effect in effects.items()} if total > 0 else {}


def _encode(d: Any, values: list[Any]) -> np.ndarray:
    """[points, columns]: a position in [0, 1], or an indicator per choice where choices have no
    order.
    """
    if isinstance(d, Choice) and not d.is_ordered:
        return np.array([[float(value == choice) for choice in d.values] for value in values])
    return np.array([[-0.1 if (at := d.position(value)) is None else at] for value in values])


def _spread(block: np.ndarray) -> np.ndarray:
    """Distinct rows of a block, at most twelve, evenly chosen."""
    rows = np.unique(block, axis=0)
    return rows[
        np.unique(np.linspace(0, len(rows) - 1, min(_STEPS, len(rows))).round().astype(int))
    ]
