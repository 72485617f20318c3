"""Small dense solvers in float64 behind the feature selection: non-negative quadratic programmes
and a guarded inverse.

Sparse non-negative weights on D features from the HSIC statistics: variational HSIC lasso, and a
plain non-negative lasso.

Both end in the quadratic programme of `quadratic.py`. Everything runs in float64 on the CPU: a D x
D problem is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lapack
from torch import Tensor

from cimage_dist.ci.hsic import HsicStats

Array = NDArray[np.float64]

STEP_TOL = 1e-8
MAX_SWEEPS = 500
_MAX_PIVOTS = 20
_KKT_TOL = 1e-11


def nonnegative_qp(matrix: Array, linear: Array, guess: Array) -> Array:
    """argmin `½ wᵀPw - qᵀw` over w >= 0 by cyclic coordinate descent, at most 500 sweeps, to a
    largest step below 1e-8 (§7.6).

    Coordinate descent finds the support soon and then creeps when P is ill-conditioned. After 1, 2,
    4, 8, ... sweeps the support is therefore handed to principal pivoting; its answer counts only
    when it meets the optimality conditions, so it is the same minimiser, exactly and whatever the
    starting point. Shapes: P [p, p] positive (semi)definite, q and guess [p].
    """
    w = np.maximum(guess, 0.0)
    residual = linear - matrix @ w
    diagonal = np.maximum(matrix.diagonal(), np.finfo(float).tiny)
    for sweep in range(1, MAX_SWEEPS + 1):
        largest = _sweep(matrix, diagonal, w, residual)
        if largest < STEP_TOL or sweep & (sweep - 1) == 0:
            exact = _pivot(matrix, linear, w > 0)
            if exact is not None:
                return exact
        if largest < STEP_TOL:
            break
        residual = linear - matrix @ w
    return w


def _sweep(matrix: Array, diagonal: Array, w: Array, residual: Array) -> float:
    """One pass over the coordinates that are positive or want to be; updates w and residual = q -
    Pw in place, returns the largest step.
    """
    largest = 0.0
    for i in np.flatnonzero((w > 0) | (residual > 0)):
        new = max(w[i] + residual[i] / diagonal[i], 0.0)
        step = new - w[i]
        if step != 0.0:
            residual -= step * matrix[i]
            w[i] = new
            largest = max(largest, abs(step))
    return largest


def _pivot(matrix: Array, linear: Array, support: NDArray[np.bool_]) -> Array | None:
    """Block principal pivoting (Júdice & Pires 1994): solve on the support, exchange every
    violating coordinate; None without success.
    """
    support = support.copy()
    scale = _KKT_TOL * max(float(np.abs(linear).max(initial=0.0)), np.finfo(float).tiny)
    for _ in range(_MAX_PIVOTS):
        index = np.flatnonzero(support)
        w = np.zeros_like(linear)
        if index.size:
            _, solution, info = lapack.dposv(matrix[np.ix_(index, index)], linear[index])
            if info != 0:
                return None
            w[index] = solution
        gradient = matrix @ w - linear
        wrong = np.where(support, w < 0, gradient < -scale)
        if not wrong.any():
            # A nearly singular support can pass the sign test with a useless solution.
            return w if np.abs(gradient[index]).max(initial=0.0) <= 1e3 * scale else None
        support ^= wrong
    return None


def jacobi(matrix: Array, linear: Array, guess: Array, tol: float = 1e-5) -> Array:
    """The released simultaneous update of all coordinates, ended when the length of the step stops
    shrinking by `tol` (§7.6).

    Kept for parity: with a positive matrix far from diagonal dominance it diverges and leaves
    early.
    """
    diagonal = matrix.diagonal()
    w, length = guess, np.inf
    for _ in range(MAX_SWEEPS):
        new = np.maximum(linear - matrix @ w + diagonal * w, 0.0) / diagonal
        step = float(np.linalg.norm(new - w))
        if length - step < tol or step < tol:
            return w if np.linalg.norm(new) < tol else new
        w, length = new, step
    return w


class Inverse(NamedTuple):
    """Of a positive definite matrix M: upper Cholesky factor of M + ridge·I, diagonal of its
    inverse [d], log-determinant, and the ridge (mostly 0).
    """

    factor: Array
    diagonal: Array
    logdet: float
    ridge: float


def invert(matrix: Array) -> Inverse:
    """One that is not positive definite, numerically, gets a ridge of 1e-6 of its mean diagonal.

    With M = UᵀU the diagonal of M⁻¹ is the row sums of squares of U⁻¹: two thirds of the work of
    the whole inverse. The transpose is the column order LAPACK works in, so that nothing is copied
    over.
    """
    ridge = 0.0
    factor, info = lapack.dpotrf(matrix.T, lower=0)
    if info != 0:
        ridge = 1e-6 * float(np.trace(matrix)) / matrix.shape[0]
        factor, info = lapack.dpotrf((matrix + ridge * np.eye(matrix.shape[0])).T, lower=0)
    inverse, _ = lapack.dtrtri(factor, lower=0)
    squares = np.einsum("ij,ij->i", inverse, inverse)
    return Inverse(factor, squares, 2.0 * float(np.sum(np.log(factor.diagonal()))), ridge)


Inner = Literal["cd", "jacobi"]

MIN_COVERAGE = 0.5
_MAX_CONDITION = 1e10
_RIDGE = 1e-6
_TINY = 1e-12


@dataclass(frozen=True)
class VIResult:
    """Weights omega [D] >= 0 with exact zeros, noise variance, value of the bound, outer passes,
    number of non-zero weights.
    """

    omega: Tensor
    sigma2: float
    bound: float
    iterations: int
    active: int


@dataclass(frozen=True)
class _State:
    """w, diag Σ and f of §7.6 for the kept features, σ², and the bound."""

    w: Array
    variance: Array
    f: Array
    sigma2: float
    bound: float


@dataclass(frozen=True)
class VIProblem:
    """What does not depend on λ: the features kept, the adaptive weights, and the state after the
    first, unpenalised pass (§7.6).
    """

    num_features: int
    keep: NDArray[np.int64]
    gram: Array
    cross: Array
    y2: float
    num_rows: float
    nu: float
    adaptive: Array
    first: _State


def kept_features(stats: HsicStats) -> NDArray[np.int64]:
    """Positions of the features that vary in at least half of the blocks; the others keep weight
    zero (§12.1).
    """
    return np.flatnonzero(stats.coverage.numpy() >= MIN_COVERAGE)


def prepare_vi(stats: HsicStats, *, nu: float = 1.5) -> VIProblem:
    """The λ-free part of the variational solve, shared by all solves of a bisection.

    Adaptive weights `a = |G⁻¹b|`; with a condition number above 1e10, `a = |(G + εI)⁻¹b|`, `ε =
    1e-6 tr(G)/D`. Floored at 1e-6 of the largest in both cases (§12.1), so that a vanishing weight
    means a heavy penalty and not a division by zero.
    """
    keep = kept_features(stats)
    gram, cross = stats.G.numpy()[np.ix_(keep, keep)], stats.b.numpy()[keep]
    adaptive = np.zeros(keep.size)
    if keep.size:
        adaptive = np.abs(_solve(gram, cross))
        adaptive = np.maximum(adaptive, max(_RIDGE * adaptive.max(), _TINY))
    ones = np.ones(keep.size)
    start = _State(ones, ones, ones, 1.0, math.inf)
    num_rows = float(max(stats.n * stats.block_size * stats.repeats, 1))
    bare = VIProblem(stats.b.numel(), keep, gram, cross, stats.y2, num_rows, nu, adaptive, start)
    if not keep.size:
        return bare
    first = _outer_pass(bare, start, lambda _, inverse: lapack.dpotrs(inverse.factor, cross)[0])
    return replace(bare, first=first)


def _solve(gram: Array, cross: Array) -> Array:
    """`G⁻¹b`, or with a condition number (LAPACK's estimate, 1-norm) above 1e10 `(G + εI)⁻¹b`, `ε =
    1e-6 tr(G)/D`.
    """
    factor, info = lapack.dpotrf(gram.T, lower=0)
    reciprocal = 0.0
    if info == 0:
        reciprocal = lapack.dpocon(factor, np.abs(gram).sum(axis=0).max(), uplo="U")[0]
    if reciprocal * _MAX_CONDITION <= 1.0:
        factor, _ = lapack.dpotrf(
            (gram + _RIDGE * np.trace(gram) / gram.shape[0] * np.eye(gram.shape[0])).T, lower=0
        )
    solution: Array = lapack.dpotrs(factor, cross)[0]
    return solution


def solve_vi(
    stats: HsicStats | VIProblem,
    lam: float,
    *,
    warm: Tensor | None = None,
    inner: Inner = "cd",
    tol: float = 1e-5,
    max_outer: int = 100,
    nu: float = 1.5,
) -> VIResult:
    """Weights of the variational HSIC lasso with penalty λ on positive and an infinite one on
    negative weights (§7.6).

    One pass: `P = G + σ² diag(1/g)`, `Σ = σ² P⁻¹`, `g = w² + diag Σ`; L1 step `w = argmin ½wᵀPw -
    (b - θ)ᵀw, w >= 0` on the active set,
    `θ = λ (RSS + tr GΣ)/a` from the pass before; features at or below `tol` leave the active set
    for good; `σ² = (RSS + tr GΣ)/R_eff`,
    `R_eff = n·B·M`. Ends when the relative change of the full bound is below `tol`, or nothing is
    active.
    `inner="jacobi"` is the released simultaneous update, for parity only. `warm` [D] merely
    shortens the first L1 step.
    """
    problem = stats if isinstance(stats, VIProblem) else prepare_vi(stats, nu=nu)
    state, iterations = problem.first, 1
    active = (
        state.w > tol if inner == "cd" else np.ones(problem.keep.size, dtype=bool)
    )  # the release does not prune after its first pass
    guess = state.w if warm is None else warm.numpy()[problem.keep]
    while active.any() and iterations < max_outer:
        index = np.flatnonzero(active)
        linear = (
            problem.cross[index] - lam * state.sigma2 * problem.num_rows / problem.adaptive[index]
        )

        def l1_step(
            precision: Array,
            inverse: Inverse,
            index: NDArray[np.int64] = index,
            linear: Array = linear,
            guess: Array = guess,
        ) -> Array:
            w = np.zeros_like(guess)
            step = nonnegative_qp if inner == "cd" else jacobi
            w[index] = step(precision[np.ix_(index, index)], linear, guess[index])
            return w

        before = state.bound
        state = _outer_pass(problem, state, l1_step)
        guess = state.w
        active &= state.w > tol
        iterations += 1
        if abs(before - state.bound) <= tol * abs(state.bound):
            break
    omega = np.zeros(problem.num_features)
    omega[problem.keep[active]] = state.w[active]
    return VIResult(
        torch.from_numpy(omega), state.sigma2, state.bound, iterations, int(active.sum())
    )


def solve_nnlasso(
    stats: HsicStats, beta: float, *, warm: Tensor | None = None, tol: float = 1e-5
) -> VIResult:
    """Plain non-negative lasso `min ½ωᵀGω - bᵀω + β Σω, ω >= 0`, the same objective without
    variational terms (§7.6).

    Weights at or below `tol` are set to zero. The bound is the objective; σ² is RSS / R_eff, or NaN
    for conditional statistics, where the quadratic form is no residual.
    """
    keep = kept_features(stats)
    gram, cross = stats.G.numpy()[np.ix_(keep, keep)], stats.b.numpy()[keep]
    w = nonnegative_qp(
        gram, cross - beta, np.zeros(keep.size) if warm is None else warm.numpy()[keep]
    )
    w = np.where(w > tol, w, 0.0)
    quadratic = float(w @ gram @ w)
    rss = stats.y2 - 2.0 * float(cross @ w) + quadratic
    sigma2 = max(rss, 0.0) / max(stats.n * stats.block_size * stats.repeats, 1)
    sigma2 = math.nan if stats.is_conditional else sigma2
    omega = np.zeros(stats.b.numel())
    omega[keep] = w
    bound = quadratic / 2 - float((cross - beta) @ w)
    return VIResult(torch.from_numpy(omega), sigma2, bound, 1, int((w > 0).sum()))


def _outer_pass(
    problem: VIProblem, state: _State, weights: Callable[[Array, Inverse], Array]
) -> _State:
    """One pass of §7.6; `weights(P, P⁻¹)` gives the new w. The bound is the complete one, up to a
    constant:

    `RSS/2σ² + Σ[(½ f g + 1)/ζ + (ν+½) ln ζ - ½ ln f] - ½ ln|Σ| + tr(GΣ)/2σ² + ½ R_eff ln 2πσ²`.
    """
    gram, nu = problem.gram, problem.nu
    g = state.w**2 + state.variance
    zeta = (1.0 + 0.5 * state.f * g) / (nu + 0.5)
    f = zeta / g
    added = state.sigma2 / g
    precision = gram + np.diag(added)
    inverse = invert(precision)
    w = weights(precision, inverse)
    variance = state.sigma2 * inverse.diagonal
    # tr GP⁻¹ = tr (P - diag)P⁻¹, which needs the diagonal of P⁻¹ alone.
    trace = state.sigma2 * (g.size - float((added + inverse.ridge) @ inverse.diagonal))
    rss = max(problem.y2 - 2.0 * float(problem.cross @ w) + float(w @ gram @ w), 0.0)
    sigma2 = max(rss + trace, _TINY * problem.y2, _TINY**2) / problem.num_rows
    prior = np.sum(
        (0.5 * f * (w**2 + variance) + 1.0) / zeta + (nu + 0.5) * np.log(zeta) - 0.5 * np.log(f)
    )
    entropy = 0.5 * (g.size * math.log(state.sigma2) - inverse.logdet)
    likelihood = 0.5 * problem.num_rows * math.log(2.0 * math.pi * sigma2)
    bound = (rss + trace) / (2.0 * sigma2) + float(prior) - entropy + likelihood
    return _State(w, variance, f, sigma2, bound)
