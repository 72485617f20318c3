"""Paired comparisons over seeds: differences, Holm's test, equivalence within a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

MARGIN = 0.5  # points within which two rows may be called equal
LEVEL = 0.05
CONTROLS = {
    "raw": "raw features",
    "smoothed": "smoothed features",
    "pagerank": "features after PageRank",
    "pca": "principal components",
    "untrained": "untrained encoder",
}


def value_at(result: dict[str, Any], path: str) -> float | None:
    """`node.test` of a result, None where it is absent."""
    found: Any = result
    for part in path.split("."):
        found = (found or {}).get(part)
    return found


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
