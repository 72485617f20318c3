"""From feature weights to the partition of factors: scores, choice of the penalty, and what to do
when the data do not decide.

Shapes: K factors of c channels, D = K·c features ("channel") or D = K ("factor_mean").
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from cimage_dist.ci import Features, factor_means, factor_scores, random_half
from cimage_dist.ci.hsic import HsicStats
from cimage_dist.ci.selection import (
    Inner,
    VIProblem,
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
# Spent on an exact hit once the count is near enough, in the first search of a run.
_REFINE_SOLVES = 6
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
            solve = _Solves(stats, num_factors, features, solver, inner)
            goal = num_factors // 2 if target is None else target
            scores = _choose(solve, lam, goal, previous, seed)
        if scores.num_solves:
            scores = replace(scores, omega=scores.omega / (2.0 * (1.0 - pi)))
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
    is_mean = features == "factor_mean"
    if num_factors < 1 or width % num_factors or (is_mean and width != num_factors):
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
    solve: _Solves, lam: float | str, target: int, previous: CIScores | None, seed: int
) -> CIScores:
    stats, num_factors = solve.stats, solve.num_factors
    if refused := refusal(stats):
        return _without_solve(solve, previous, seed, *refused)
    if num_factors == 1:
        only = _Trial(0.0, None, torch.ones(1, dtype=torch.float64))
        return _result(only, solve, "single-factor", "one factor cannot be split")
    if isinstance(lam, str):
        last = 0.0 if previous is None else previous.lam
        # Above max b the lasso has no weight at all: without a previous penalty its search comes
        # down from there.
        cold = float(stats.b.max()) / 2 if solve.solver == "nnlasso" else None
        best, notes = _search(solve, target, last if last > 0 else cold, last > 0)
    else:
        best, notes = _rescale(solve, float(lam))
    if best.size == 0:
        scores, status, why = _top_b(solve), "fallback-top-b", "all weights are zero"
    elif best.size == num_factors:
        scores = _without_smallest(best.scores)
        status, why = "fallback-smallest", "no factor has weight zero"
    else:
        return _result(best, solve, "ok", notes)
    return _result(replace(best, scores=scores), solve, status, f"{why}; {notes}".rstrip("; "))


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
        self.stats, self.num_factors, self.features = stats, num_factors, features
        self.solver: Solver = "nnlasso" if stats.is_conditional else solver
        self._inner: Inner = inner
        self._warm: Tensor | None = None

    @cached_property
    def _problem(self) -> VIProblem:
        return prepare_vi(self.stats)

    def __call__(self, lam: float) -> _Trial:
        if self.solver == "vi":
            outcome = solve_vi(self._problem, lam, warm=self._warm, inner=self._inner)
        else:
            outcome = solve_nnlasso(self.stats, lam, warm=self._warm)
        self.count += 1
        self._warm = outcome.omega
        return _Trial(lam, outcome, factor_scores(outcome.omega, self.num_factors, self.features))


def _search(solve: _Solves, target: int, start: float | None, is_warm: bool) -> tuple[_Trial, str]:
    """Bisection of log λ, bracketed outward from `start` if there is one.

    From a previous λ (`is_warm`) the first count that is near enough ends it; else the nearest
    count wins, then the smaller λ.
    """
    tolerance = max(1, solve.num_factors // 16)
    low, high = math.log(LAM_RANGE[0]), math.log(LAM_RANGE[1])
    left, right = low, high
    is_left_known = is_right_known = start is None  # without a start the whole range is the bracket
    x, stride = (low + high) / 2, math.log(4.0)
    if start is not None:
        x = min(max(math.log(max(start, LAM_RANGE[0])), low), high)
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
    note = f"no penalty in [{LAM_RANGE[0]:g}, {LAM_RANGE[1]:g}] gives a first context of about "
    return best, f"{note}{target} of {solve.num_factors} factors; nearest is {best.size}"


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
    note = f"lambda {'halved' if is_empty else 'doubled'} {steps} times from {lam:g}"
    return trial, note if steps else ""


def refusal(stats: HsicStats) -> tuple[str, str] | None:
    """Status and reason when the data cannot decide, else None."""
    is_finite = bool(torch.isfinite(stats.G).all() and torch.isfinite(stats.b).all())
    if stats.num_nonfinite or not is_finite:
        reason = f"{stats.num_nonfinite} values of the sampled embeddings are NaN or infinite"
        return "skipped-nonfinite", reason
    if stats.n < 2 * stats.block_size:
        reason = f"{stats.n} pseudo-labelled nodes are fewer than two blocks of {stats.block_size}"
        return "undecided", reason
    if stats.num_classes < 2:
        return "undecided", "the pseudo-labelled nodes hold fewer than two classes"
    if stats.num_blocks == 0 or stats.zero_label_fraction > 0.5:
        return "undecided", f"{stats.zero_label_fraction:.0%} of the blocks hold a single class"
    if kept_features(stats).size == 0:
        return "undecided", "every feature is constant in most blocks"
    return None


def _without_solve(
    solve: _Solves, previous: CIScores | None, seed: int, status: str, reason: str
) -> CIScores:
    is_open = status == "undecided"
    if previous is not None:
        status = "kept-previous" if is_open else status
        return replace(previous, num_solves=0, status=status, notes=reason)
    half = random_half(solve.num_factors, seed).to(torch.float64)
    return _result(_Trial(0.0, None, half), solve, "random-half" if is_open else status, reason)


def _top_b(solve: _Solves) -> Tensor:
    """F1 = the ⌈K/4⌉ factors most dependent on the labels by mean b, scored by it; [K]."""
    mean = factor_means(solve.stats.b, solve.num_factors, solve.features)
    top = torch.argsort(mean, descending=True, stable=True)[: math.ceil(mean.numel() / 4)]
    scores, tiny = torch.zeros_like(mean), torch.finfo(mean.dtype).tiny
    scores[top] = (mean[top] / mean.max().clamp(min=tiny)).clamp(min=tiny)
    return scores


def _without_smallest(scores: Tensor) -> Tensor:
    """F2 = the ⌈K/4⌉ factors of smallest mean weight; their scores become zero; [K]."""
    scores = scores.clone()
    scores[torch.argsort(scores, stable=True)[: math.ceil(scores.numel() / 4)]] = 0.0
    return scores


def _result(trial: _Trial, solve: _Solves, status: str, notes: str) -> CIScores:
    omega, sigma2 = torch.zeros(solve.stats.b.numel(), dtype=torch.float64), 0.0
    if trial.outcome is not None:
        omega, sigma2 = trial.outcome.omega, trial.outcome.sigma2
    chosen = trial.scores > 0
    return CIScores(trial.scores, chosen, trial.lam, sigma2, omega, solve.count, status, notes)
