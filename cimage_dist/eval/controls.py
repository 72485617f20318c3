"""What an embedding must beat, node features smoothed over the graph without any training; and
paired comparisons over seeds: differences, Holm's test, equivalence within a margin.

Shapes: N nodes, F feature columns. Â = D^-1/2 (A + I) D^-1/2 with D the degrees of A + I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.eval.logistic import unit_rows
from cimage_dist.eval.probe import Pool, make_pool, score_rows
from cimage_dist.eval.score import pick_score, row_scores
from cimage_dist.io.artifacts import value_at
from cimage_dist.types import Features, LinkSplit, NodeSplit, Topology

HOPS = (1, 2, 3, 4, 6, 8)
ALPHAS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
STEPS = 10
FIXED_HOPS, FIXED_ALPHA = 2, 0.2  # where no labels can choose
_COLUMNS = 256
_MOST_CANDIDATES = 1 << 28  # entries of all candidates together: 1 GiB
_MOST_EXACT_PCA = 2048  # columns up to which the F × F covariance is decomposed
MARGIN = 0.5  # points within which two rows may be called equal
LEVEL = 0.05
CONTROLS = {
    "raw": "raw features",
    "smoothed": "smoothed features",
    "pagerank": "features after PageRank",
    "pca": "principal components",
    "untrained": "untrained encoder",
}


def hop_weights(hops: int) -> list[float]:
    """Weights of Â^0, Â^1, ... in Â^hops."""
    return [0.0] * hops + [1.0]


def pagerank_weights(alpha: float, steps: int = STEPS) -> list[float]:
    """Weights of Â^0, Â^1, ... in h_steps of h ← (1-α) Â h + α x, h_0 = x:

    h_T = α Σ_{s<T} (1-α)^s Â^s x + (1-α)^T Â^T x.
    """
    return [alpha * (1 - alpha) ** s for s in range(steps)] + [(1 - alpha) ** steps]


@torch.no_grad()
def propagate(
    x: Features, topology: Topology, weights: Sequence[Sequence[float]], nodes: Tensor | None = None
) -> Tensor:
    """Σ_s weights[j][s] Â^s x for every j, float32 [J, n, F]; of `nodes` int64 [n] only, else all.

    The powers are computed once for all j, on 256 feature columns at a time, so beside the result
    only a few N × 256 values are held. An isolated node keeps its features.
    """
    count = x.shape[0] if nodes is None else nodes.numel()
    out = torch.zeros(len(weights), count, x.shape[1], dtype=torch.float32, device=x.device)
    scale = (topology.degrees() + 1).to(torch.float32).rsqrt()[:, None]
    indices, offsets = topology.indices, topology.indptr[:-1].to(topology.indices.dtype)
    last = max(len(row) for row in weights)
    for begin in range(0, x.shape[1], _COLUMNS):
        columns = slice(begin, begin + _COLUMNS)
        power = _some_columns(x, columns)
        for s in range(last):
            if s:
                scaled = power * scale
                # A bag per row of the adjacency sums neighbours without gathering E × 256 values.
                power = (F.embedding_bag(indices, scaled, offsets, mode="sum") + scaled) * scale
            part = power if nodes is None else power[nodes]
            for j, row in enumerate(weights):
                if s < len(row) and row[s]:
                    out[j, :, columns].add_(part, alpha=row[s])
    return out


def _some_columns(x: Features, columns: slice) -> Tensor:
    """A range of columns, dense in float32."""
    if isinstance(x, Tensor):
        return x[:, columns].float()
    kept = (x.column >= columns.start) & (x.column < columns.stop)
    width = min(columns.stop, x.shape[1]) - columns.start
    out = torch.zeros(x.shape[0], width, device=x.device)
    out[x.row[kept], x.column[kept] - columns.start] = x.value[kept].float()
    return out


def smooth_features(x: Features, topology: Topology, hops: int = FIXED_HOPS) -> Tensor:
    """Â^hops x, float32 [N, F]."""
    return propagate(x, topology, [hop_weights(hops)])[0]


def pagerank_features(x: Features, topology: Topology, alpha: float = FIXED_ALPHA) -> Tensor:
    """h after ten steps of h ← (1-α) Â h + α x, float32 [N, F]."""
    return propagate(x, topology, [pagerank_weights(alpha)])[0]


@dataclass(frozen=True)
class Choice:
    """Hops and α; `scores` of the candidates at their best, empty where nothing could choose.

    `by`: "pool" (accuracy over the draws), "links" (AUC of the validation edges) or "fixed".
    """

    hops: int
    alpha: float
    scores: dict[str, float]
    by: str

    @property
    def best(self) -> str:
        """raw, smoothed or pagerank, by score; pagerank where there is none."""
        return max(self.scores, key=lambda name: self.scores[name], default="pagerank")


def choose(
    x: Features,
    topology: Topology,
    y: Tensor | None,
    split: NodeSplit | None,
    links: LinkSplit | None = None,
) -> Choice:
    """Hops out of HOPS and α out of ALPHAS by the score over the draws; without labels by the
    ranking of the validation edges, where edges are held out; else fixed ones.

    All features count. Where the candidates' rows would need more than 1 GiB, the choice is made on
    a keyed part of the nodes. Of equal scores the first is taken. No test label or edge is read.
    """
    candidates = len(HOPS) + len(ALPHAS)
    most = min(50_000, max(1000, _MOST_CANDIDATES // (candidates * x.shape[1])))
    pool = None if y is None or split is None else make_pool(y, split, most)
    score: Callable[[Tensor], float]
    if pool is not None:
        nodes, by, score = pool.nodes, "pool", partial(_pooled, pool=pool)
    elif links is not None:
        some = _some_pairs(links, most)
        nodes, by, score = some.nodes, "links", some.score
    else:
        return Choice(FIXED_HOPS, FIXED_ALPHA, {}, "fixed")
    weights = [hop_weights(k) for k in HOPS] + [pagerank_weights(a) for a in ALPHAS]
    scores = [score(rows) for rows in propagate(x, topology, weights, nodes)]
    hop, alpha = _first_best(scores[: len(HOPS)]), _first_best(scores[len(HOPS) :])
    found = {
        "raw": score(propagate(x, topology, [hop_weights(0)], nodes)[0]),
        "smoothed": scores[hop],
        "pagerank": scores[len(HOPS) + alpha],
    }
    return Choice(HOPS[hop], ALPHAS[alpha], found, by)


def _pooled(rows: Tensor, pool: Pool) -> float:
    return score_rows(unit_rows(rows), pool).mean


@dataclass(frozen=True)
class _Pairs:
    """Validation pairs whose ends count among `nodes` int64 [n]: links with pairs of positions."""

    nodes: Tensor
    links: LinkSplit

    def score(self, rows: Tensor) -> float:
        """AUC of the pairs by rows [n, F] of the nodes, scored the way that suits them best."""
        return pick_score(row_scores(rows), self.links)[1]["auc"]


def _some_pairs(links: LinkSplit, most: int) -> _Pairs:
    """The first validation pairs, which are in random order, with at most `most` ends."""
    pos, neg = links.val_pos[: most // 4], links.val_neg[: most // 4]
    nodes, at = torch.cat([pos, neg]).unique(return_inverse=True)
    local = replace(links, val_pos=at[: len(pos)], val_neg=at[len(pos) :])
    return _Pairs(nodes, local)


def _first_best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda at: (scores[at], -at))


@torch.no_grad()
def principal_components(x: Tensor, width: int) -> Tensor:
    """(x̂ − mean) V, float32 [N, min(width, N, F)]: x̂ unit rows, V their principal directions.

    Up to 2,048 columns from the covariance, else by a randomised SVD with a fixed seed.
    """
    rows = F.normalize(x.float(), dim=1, eps=1e-12)
    width = min(width, *rows.shape)
    rows -= rows.mean(0)
    if rows.shape[1] <= _MOST_EXACT_PCA:
        covariance = sum((p.T @ p for p in rows.double().split(65_536)), torch.tensor(0.0))
        directions = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :width]
        return rows @ directions.float()
    from sklearn.utils.extmath import randomized_svd

    left, values, _ = randomized_svd(rows.numpy(), width, n_iter=2, random_state=0)
    return torch.from_numpy(left * values)


@dataclass(frozen=True)
class Paired:
    """Difference of two rows over the seeds both have: mean, standard error, two-sided p of the
    paired t-test (None below 3 seeds).
    """

    seeds: int
    mean: float
    error: float
    p: float | None

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 % confidence, by the t distribution."""
        from scipy.stats import t

        half = float(t.ppf(0.975, self.seeds - 1)) * self.error
        return self.mean - half, self.mean + half


def paired(
    ours: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], path: str
) -> Paired | None:
    left, right = ({r["seed"]: value_at(r, path) for r in rows} for rows in (ours, other))
    both = [(left[seed], right[seed]) for seed in sorted(left.keys() & right.keys())]
    gaps = [a - b for a, b in both if a is not None and b is not None]
    return of_differences(gaps) if len(gaps) > 1 else None


def of_differences(gaps: Sequence[float]) -> Paired:
    """Mean of at least two differences with its t-test against 0.

    Equal differences have no spread to judge by (accuracy comes in steps of one test node): p is
    then None, or 1 where all are 0.
    """
    from scipy.stats import ttest_1samp

    gap = np.array(gaps, dtype=float)
    error = float(gap.std(ddof=1) / np.sqrt(len(gap)))
    is_same = error < 1e-9 * (1 + abs(float(gap.mean())))
    p = None
    if len(gap) > 2 and not is_same:
        p = float(ttest_1samp(gap, 0.0).pvalue)
    elif len(gap) > 2 and not gap.any():
        p = 1.0
    return Paired(len(gap), float(gap.mean()), 0.0 if is_same else error, p)


class Comparison(NamedTuple):
    dataset: str
    row: str
    found: Paired


def stands_out(comparisons: Sequence[Comparison]) -> list[bool]:
    """Which differences are not 0, by Holm's test over all comparisons of a table."""
    return _holm([c.found.p for c in comparisons])


def equal(comparisons: Sequence[Comparison]) -> list[bool]:
    """Which differences lie inside ±MARGIN, by paired TOST and Holm's test over the comparisons."""
    return _holm([equivalence(c.found) for c in comparisons])


def equivalence(found: Paired, margin: float = MARGIN) -> float | None:
    """p of the paired TOST: the larger of the two one-sided p of mean > -margin and mean < margin.

    With t of n-1 degrees of freedom: P(t > (mean + margin)/error), P(t > (margin - mean)/error).
    None where the test of a difference has none.
    """
    from scipy.stats import t

    if found.p is None:
        return None
    if found.error == 0:
        return 0.0  # the rows are the same
    nearest = (margin - abs(found.mean)) / found.error
    return float(t.sf(nearest, found.seeds - 1))


def _holm(values: Sequence[float | None]) -> list[bool]:
    """Holm's step-down test: p sorted ascending, p_(i) < level / (m - i) for all up to i."""
    known = sorted((p, at) for at, p in enumerate(values) if p is not None)
    chosen = [False] * len(values)
    for rank, (p, at) in enumerate(known):
        if p >= LEVEL / (len(known) - rank):
            break
        chosen[at] = True
    return chosen
