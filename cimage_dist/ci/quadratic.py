"""Small dense solvers in float64 behind the feature selection: non-negative quadratic programmes and a guarded inverse."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

Array = NDArray[np.float64]

STEP_TOL = 1e-8
MAX_SWEEPS = 500
_MAX_PIVOTS = 20
_KKT_TOL = 1e-11


def nonnegative_qp(matrix: Array, linear: Array, guess: Array) -> Array:
    """argmin `½ wᵀPw - qᵀw` over w >= 0 by cyclic coordinate descent, at most 500 sweeps, to a largest step below 1e-8 (§7.6).

    Coordinate descent finds the support soon and then creeps when P is ill-conditioned. After 1, 2, 4, 8, ... sweeps the support is
    therefore handed to principal pivoting; its answer counts only when it meets the optimality conditions, so it is the same
    minimiser, exactly and whatever the starting point. Shapes: P [p, p] positive (semi)definite, q and guess [p].
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
    """One pass over the coordinates that are positive or want to be; updates w and residual = q - Pw in place, returns the largest step."""
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
    """Block principal pivoting (Júdice & Pires 1994): solve on the support, exchange every violating coordinate; None without success."""
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
    """The released simultaneous update of all coordinates, ended when the length of the step stops shrinking by `tol` (§7.6).

    Kept for parity: with a positive matrix far from diagonal dominance it diverges and leaves early.
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
    """Of a positive definite matrix M: upper Cholesky factor of M + ridge·I, diagonal of its inverse [d], log-determinant, and the ridge (mostly 0)."""

    factor: Array
    diagonal: Array
    logdet: float
    ridge: float


def invert(matrix: Array) -> Inverse:
    """One that is not positive definite, numerically, gets a ridge of 1e-6 of its mean diagonal.

    With M = UᵀU the diagonal of M⁻¹ is the row sums of squares of U⁻¹: two thirds of the work of the whole inverse. The transpose is the column
    order LAPACK works in, so that nothing is copied over.
    """
    ridge = 0.0
    factor, info = lapack.dpotrf(matrix.T, lower=0)
    if info != 0:
        ridge = 1e-6 * float(np.trace(matrix)) / matrix.shape[0]
        factor, info = lapack.dpotrf((matrix + ridge * np.eye(matrix.shape[0])).T, lower=0)
    inverse, _ = lapack.dtrtri(factor, lower=0)
    return Inverse(factor, np.einsum("ij,ij->i", inverse, inverse), 2.0 * float(np.sum(np.log(factor.diagonal()))), ridge)
