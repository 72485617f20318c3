"""From feature weights to the partition of factors: scores, choice of the penalty, and what to do
when the data do not decide.

Shapes: K factors of c channels, D = K·c features ("channel") or D = K ("factor_mean").
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from cimage_dist.ci import Features, factor_means, factor_scores, random_half
from cimage_dist.ci.hsic import HsicStats
from cimage_dist.ci.selection import (
    Inner,
    VIResult,
    kept_features,
    prepare_vi,
    solve_nnlasso,
    solve_vi,
)
from cimage_dist.comm import Comm
from cimage_dist.errors import UserError
from cimage_dist.types import CIScores

Solver = Literal["vi", "nnlasso"]

_LOG = logging.getLogger("cimage")
LAM_RANGE = (1e-8, 1.0)
MAX_SOLVES = 25
MAX_RESCALES = 20
_REFINE_SOLVES = (
    6  # spent on an exact hit once the count is near enough, in the first search of a run
)
_MIN_WIDTH = 1e-3


def choose_partition(
    stats: HsicStats,
    num_factors: int,
    *,
    features: Features = "channel",
    lam: float | Literal["auto"] = "auto",
    target: int | None = None,
    solver: Solver = "vi",
    inner: Inner = "cd",
    pi: float = 0.5,
    previous: CIScores | None = None,
    seed: int = 0,
    comm: Comm | None = None,
) -> CIScores:
    """Collective: the partition `F1 = {k : Sc_k > 0}`, solved on rank 0 and broadcast, so that
    ranks cannot disagree (§7.7, §12.1).

    `lam="auto"` searches λ in [1e-8, 1] until |F1| is within max(1, K/16) of `target` (default
    K/2), starting from the previous λ; for
    `solver="nnlasso"` λ is β. π only rescales the weights, `ω / (2(1-π))`, never G (§7.5).
    Degenerate data keep the previous partition.
    """
    comm = comm or Comm()
    _check(stats, num_factors, features, lam, target, pi)
    scores = None
    if comm.is_main:
        # One BLAS thread: these matrices are too small to share, and busy cores would make the
        # threads wait for each other.
        with threadpool_limits(limits=1, user_api="blas"):
            scores = _choose(
                stats,
                num_factors,
                features,
                lam,
                num_factors // 2 if target is None else target,
                solver,
                inner,
                previous,
                seed,
            )
        scores = (
            replace(scores, omega=scores.omega / (2.0 * (1.0 - pi)))
            if scores.num_solves
            else scores
        )
        if scores.notes:
            _LOG.info("CI scores %s: %s", scores.status, scores.notes)
    return comm.broadcast_object(scores)


def _check(
    stats: HsicStats,
    num_factors: int,
    features: Features,
    lam: float | str,
    target: int | None,
    pi: float,
) -> None:
    width = stats.b.numel()
    if (
        (features == "factor_mean" and width != num_factors)
        or num_factors < 1
        or width % num_factors
    ):
        raise UserError(
            f"CI scores in mode '{features}' with {num_factors} factors do not fit HSIC "
            f"statistics of {width} features."
        )
    if not 0 <= pi < 1:
        raise UserError(f"The CI weight pi must lie in [0, 1); got {pi}.")
    if target is not None and not 1 <= target <= max(num_factors - 1, 1):
        raise UserError(
            f"The target size of the first context must lie between 1 and {num_factors - 1} of "
            f"{num_factors} factors; got {target}."
        )
    if not isinstance(lam, str) and not lam >= 0:
        raise UserError(
            f"The CI penalty lambda must be 'auto' or a number that is not negative; got {lam}."
        )


def _choose(
    stats: HsicStats,
    num_factors: int,
    features: Features,
    lam: float | str,
    target: int,
    solver: Solver,
    inner: Inner,
    previous: CIScores | None,
    seed: int,
) -> CIScores:
    refused = refusal(stats)
    if refused is not None:
        status, reason = refused
        return _without_solve(stats, num_factors, previous, seed, status, reason)
    if num_factors == 1:
        return _result(
            _Trial(0.0, None, torch.ones(1, dtype=torch.float64)),
            stats,
            0,
            "single-factor",
            "one factor cannot be split",
        )
    solve = _Solves(
        stats, num_factors, features, "nnlasso" if stats.is_conditional else solver, inner
    )
    if isinstance(lam, str):
        is_warm = previous is not None and previous.lam > 0
        # Above max b the lasso has no weight at all: without a previous penalty its search comes
        # down from there.
        cold = float(stats.b.max()) / 2 if solve.solver == "nnlasso" else None
        best, notes = _search(
            solve, target, previous.lam if is_warm and previous is not None else cold, is_warm
        )
    else:
        best, notes = _rescale(solve, float(lam))
    if best.size == 0:
        return _top_b(best, stats, num_factors, features, solve.count, notes)
    if best.size == num_factors:
        return _smallest(best, stats, num_factors, features, solve.count, notes)
    return _result(best, stats, solve.count, "ok", notes)


@dataclass(frozen=True)
class _Trial:
    """One solve: its penalty, outcome and factor scores [K]."""

    lam: float
    outcome: VIResult | None
    scores: Tensor

    @property
    def size(self) -> int:
        return int((self.scores > 0).sum())


class _Solves:
    """Solves at different penalties, each started from the weights of the one before; counts
    them.
    """

    def __init__(
        self, stats: HsicStats, num_factors: int, features: Features, solver: Solver, inner: Inner
    ) -> None:
        self.count = 0
        self.num_factors = num_factors
        self.solver = solver
        self._features: Features = features
        self._warm: Tensor | None = None
        self._run: Callable[[float], VIResult]
        if solver == "vi":
            problem = prepare_vi(stats)
            self._run = lambda lam: solve_vi(problem, lam, warm=self._warm, inner=inner)
        else:
            self._run = lambda lam: solve_nnlasso(stats, lam, warm=self._warm)

    def __call__(self, lam: float) -> _Trial:
        outcome = self._run(lam)
        self.count += 1
        self._warm = outcome.omega
        return _Trial(lam, outcome, factor_scores(outcome.omega, self.num_factors, self._features))


def _search(solve: _Solves, target: int, start: float | None, is_warm: bool) -> tuple[_Trial, str]:
    """Bisection of log λ, bracketed outward from `start` if there is one.

    From a previous λ (`is_warm`) the first count that is near enough ends it; else the nearest
    count wins, then the smaller λ.
    """
    tolerance = max(1, solve.num_factors // 16)
    low, high = math.log(LAM_RANGE[0]), math.log(LAM_RANGE[1])
    left, right = low, high
    is_left_known = is_right_known = start is None  # without a start the whole range is the bracket
    x = (
        (low + high) / 2
        if start is None
        else min(max(math.log(max(start, LAM_RANGE[0])), low), high)
    )
    stride = math.log(4.0)
    trials: list[_Trial] = []
    near_since: int | None = None
    while len(trials) < MAX_SOLVES:
        trial = solve(math.exp(x))
        trials.append(trial)
        gap = trial.size - target
        if gap == 0 or (is_warm and abs(gap) <= tolerance and 0 < trial.size < solve.num_factors):
            break
        if near_since is None and abs(gap) <= tolerance:
            near_since = len(trials)
        if near_since is not None and len(trials) >= near_since + _REFINE_SOLVES:
            break
        if gap > 0:
            left, is_left_known = x, True
        else:
            right, is_right_known = x, True
        if right - left < _MIN_WIDTH:
            break
        if is_left_known and is_right_known:
            x = (left + right) / 2
        else:
            x = min(x + stride, high) if gap > 0 else max(x - stride, low)
            stride *= 2.0
            if x == (left if gap > 0 else right):
                break  # already at the end of the range
    usable = [trial for trial in trials if 0 < trial.size < solve.num_factors] or trials
    best = min(usable, key=lambda trial: (abs(trial.size - target), trial.lam))
    if abs(best.size - target) <= tolerance:
        return best, ""
    return (
        best,
        f"no penalty in [{LAM_RANGE[0]:g}, {LAM_RANGE[1]:g}] gives a first context of about "
        f"{target} of {solve.num_factors} factors; nearest is {best.size}",
    )


def _rescale(solve: _Solves, lam: float) -> tuple[_Trial, str]:
    """A fixed λ, halved while every weight is zero or doubled while no factor is, at most 20 times
    (§12.1).
    """
    trial = solve(lam)
    is_empty = trial.size == 0
    wrong = 0 if is_empty else solve.num_factors
    steps = 0
    while trial.size == wrong and steps < MAX_RESCALES:
        steps += 1
        trial = solve(trial.lam / 2 if is_empty else max(trial.lam * 2, LAM_RANGE[0]))
    return (
        trial,
        f"lambda {'halved' if is_empty else 'doubled'} {steps} times from {lam:g}" if steps else "",
    )


def refusal(stats: HsicStats) -> tuple[str, str] | None:
    """Status and reason when the data cannot decide, else None."""
    if stats.num_nonfinite or not bool(
        torch.isfinite(stats.G).all() and torch.isfinite(stats.b).all()
    ):
        return (
            "skipped-nonfinite",
            f"{stats.num_nonfinite} values of the sampled embeddings are NaN or infinite",
        )
    if stats.n < 2 * stats.block_size:
        return (
            "undecided",
            f"{stats.n} pseudo-labelled nodes are fewer than two blocks of {stats.block_size}",
        )
    if stats.num_classes < 2:
        return "undecided", "the pseudo-labelled nodes hold fewer than two classes"
    if stats.num_blocks == 0 or stats.zero_label_fraction > 0.5:
        return "undecided", f"{stats.zero_label_fraction:.0%} of the blocks hold a single class"
    if kept_features(stats).size == 0:
        return "undecided", "every feature is constant in most blocks"
    return None


def _without_solve(
    stats: HsicStats,
    num_factors: int,
    previous: CIScores | None,
    seed: int,
    status: str,
    reason: str,
) -> CIScores:
    if previous is not None:
        return replace(
            previous,
            num_solves=0,
            status="kept-previous" if status == "undecided" else status,
            notes=reason,
        )
    chosen = random_half(num_factors, seed)
    omega = torch.zeros(stats.b.numel(), dtype=torch.float64)
    return CIScores(
        chosen.to(torch.float64),
        chosen,
        0.0,
        0.0,
        omega,
        0,
        "random-half" if status == "undecided" else status,
        reason,
    )


def _top_b(
    best: _Trial,
    stats: HsicStats,
    num_factors: int,
    features: Features,
    num_solves: int,
    notes: str,
) -> CIScores:
    """F1 = the ⌈K/4⌉ factors most dependent on the labels by mean b, scored by it."""
    mean = factor_means(stats.b, num_factors, features)
    top = torch.argsort(mean, descending=True, stable=True)[: math.ceil(num_factors / 4)]
    scores = torch.zeros_like(mean)
    scores[top] = (mean[top] / mean.max().clamp(min=torch.finfo(mean.dtype).tiny)).clamp(
        min=torch.finfo(mean.dtype).tiny
    )
    return _result(
        replace(best, scores=scores),
        stats,
        num_solves,
        "fallback-top-b",
        f"all weights are zero; {notes}".rstrip("; "),
    )


def _smallest(
    best: _Trial,
    stats: HsicStats,
    num_factors: int,
    features: Features,
    num_solves: int,
    notes: str,
) -> CIScores:
    """F2 = the ⌈K/4⌉ factors of smallest mean weight; their scores become zero."""
    scores = best.scores.clone()
    scores[torch.argsort(scores, stable=True)[: math.ceil(num_factors / 4)]] = 0.0
    return _result(
        replace(best, scores=scores),
        stats,
        num_solves,
        "fallback-smallest",
        f"no factor has weight zero; {notes}".rstrip("; "),
    )


def _result(trial: _Trial, stats: HsicStats, num_solves: int, status: str, notes: str) -> CIScores:
    outcome = trial.outcome
    omega = torch.zeros(stats.b.numel(), dtype=torch.float64) if outcome is None else outcome.omega
    return CIScores(
        trial.scores,
        trial.scores > 0,
        trial.lam,
        0.0 if outcome is None else outcome.sigma2,
        omega,
        num_solves,
        status,
        notes,
    )
