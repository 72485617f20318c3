"""A validation score of low noise: keyed draws from the training and validation nodes together.

Shapes: P pooled nodes, R draws, F embedding width, M classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.eval.logistic import Rows, logistic_path, unit_rows
from cimage_dist.types import NodeSplit

MOST_DRAWS, _FEWEST_DRAWS = 10, 3
_FITTED_ROWS = 3000  # of all draws together: large ones are less noisy, and fewer do
_MOST_NODES = 50_000
_KEY = 2_000_000  # apart from the other users of the stream "split"


@dataclass(frozen=True)
class Pool:
    """nodes int64 [P] ascending, labels int64 [P], fitted bool [R, P]: the nodes of every draw."""

    nodes: Tensor
    labels: Tensor
    fitted: Tensor


@dataclass(frozen=True)
class PoolScore:
    """Mean accuracy over the draws and its standard error, percent, at the best strength."""

    mean: float
    error: float
    strength: float

    def as_dict(self) -> dict[str, float]:
        return {"pool": self.mean, "pool_se": self.error}


def make_pool(y: Tensor, split: NodeSplit, most: int = _MOST_NODES) -> Pool | None:
    """The draws of a graph's labels and split, the same for every method; None where none is left.

    P = labelled training and validation nodes, at most `most` of them (keyed). Each draw has the
    class counts of the training nodes, of no class more than half of its nodes in P, so that a
    strength which suits the draws suits the training nodes. Ten draws, down to three where they
    are large. No label of another node is read.
    """
    y = y.cpu()
    nodes = (split.train | split.val).cpu().nonzero().squeeze(1)
    nodes = nodes[y[nodes] >= 0]
    order = keyed.bits(keyed.stream(0, "split", _KEY), nodes).argsort()
    nodes = nodes[order[:most]].sort().values
    if nodes.numel() == 0:
        return None
    labels = y[nodes]
    in_pool = torch.bincount(labels)
    training = torch.bincount(labels[split.train.cpu()[nodes]], minlength=in_pool.numel())
    counts = torch.minimum(training, (in_pool + 1) // 2)
    size = int(counts.sum())
    if size == 0 or size == nodes.numel():
        return None
    number = min(MOST_DRAWS, max(_FEWEST_DRAWS, _FITTED_ROWS // size))
    draws = [_draw(nodes, labels, in_pool, counts, draw) for draw in range(1, number + 1)]
    return Pool(nodes, labels, torch.stack(draws))


def _draw(nodes: Tensor, labels: Tensor, in_pool: Tensor, counts: Tensor, draw: int) -> Tensor:
    """bool [P]: counts[c] nodes of every class c, the first ones in keyed order."""
    order = keyed.bits(keyed.stream(0, "split", _KEY + draw), nodes).argsort()
    by_class = order[labels[order].argsort(stable=True)]
    first = in_pool.cumsum(0) - in_pool
    rank = torch.arange(nodes.numel()) - first[labels[by_class]]
    fitted = torch.zeros(nodes.numel(), dtype=torch.bool)
    fitted[by_class[rank < counts[labels[by_class]]]] = True
    return fitted


def pool_score(z: Tensor | Rows, pool: Pool) -> PoolScore:
    """z [N, F], one row per node of the graph: see `score_rows`."""
    return score_rows(unit_rows(z, pool.nodes), pool)


def score_rows(x: Rows, pool: Pool) -> PoolScore:
    """x [P, F], the unit rows of the pooled nodes. R fits for every strength C of the grid:

        accuracy_r(C) = share of P \\ draw_r that the regression fitted on draw_r gets right,

    and C is the one with the highest mean over r (the smallest such C).
    """
    y, num_classes = pool.labels.numpy(), int(pool.labels.max()) + 1
    accuracy = []
    for fitted in pool.fitted.numpy():
        path = logistic_path(x[fitted], y[fitted], num_classes)
        hits, _ = path.scores(x[~fitted], y[~fitted])
        accuracy.append(100.0 * hits / (~fitted).sum())
    by_strength = np.stack(accuracy)  # [R, S]
    best = int(by_strength.mean(0).round(9).argmax())
    found = by_strength[:, best]
    error = float(found.std(ddof=1) / np.sqrt(len(found)))
    return PoolScore(float(found.mean()), error, path.strengths[best])
