"""The solvers: optimality, agreement with plain coordinate descent, monotone counts, ridge rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from cimage_dist.ci.hsic import HsicStats, block_statistics
from cimage_dist.ci.selection import (
    invert,
    jacobi,
    nonnegative_qp,
    prepare_vi,
    solve_nnlasso,
    solve_vi,
)
from tests import reference


def planted(seed: int, n: int = 800, width: int = 16, good: int = 2, classes: int = 4) -> HsicStats:
    """`good` label-driven columns first, standard normal noise in the others."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    x = torch.randn(n, width, generator=generator)
    x[:, :good] += 3 * torch.randn(classes, good, generator=generator)[labels]
    return block_statistics(x, labels, torch.arange(n), seed=seed)


def correlated(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A positive, far from diagonally dominant matrix like G, and a positive right-hand side."""
    rng = np.random.default_rng(seed)
    root = rng.random((size + 10, size))
    matrix = root.T @ root / size
    scale = 1 / np.sqrt(matrix.diagonal())
    return matrix * scale[:, None] * scale[None, :], rng.random(size)


@pytest.mark.parametrize("size", [1, 5, 40, 150])
def test_quadratic_programme_meets_optimality_conditions(size: int) -> None:
    matrix, linear = correlated(size, size)
    w = nonnegative_qp(matrix, linear, np.zeros(size))
    gradient = matrix @ w - linear
    assert (
        (w >= 0).all()
        and (gradient[w == 0] > -1e-9).all()
        and np.abs(gradient[w > 0]).max(initial=0) < 1e-9
    )
    other = nonnegative_qp(matrix, linear, np.ones(size))
    np.testing.assert_allclose(other, w, atol=1e-9)


def test_quadratic_programme_equals_nnls_and_plain_descent() -> None:
    rng = np.random.default_rng(0)
    tall, target = rng.random((60, 12)), rng.standard_normal(60) + 0.5
    expected, _ = nnls(tall, target)
    matrix, linear = tall.T @ tall, tall.T @ target
    np.testing.assert_allclose(nonnegative_qp(matrix, linear, np.zeros(12)), expected, atol=1e-9)
    np.testing.assert_allclose(
        nonnegative_qp(matrix, linear, np.zeros(12)),
        reference.cyclic_descent(matrix, linear, 3000),
        atol=1e-7,
    )


def test_quadratic_programme_survives_singular_and_hopeless_input() -> None:
    matrix = np.ones((3, 3))
    w = nonnegative_qp(matrix, np.array([1.0, 1.0, 0.5]), np.zeros(3))
    assert abs(w.sum() - 1) < 1e-6 and w[2] < 1e-8  # any split between the twins is optimal
    assert nonnegative_qp(np.eye(3), -np.ones(3), np.ones(3)).tolist() == [0, 0, 0]
    assert nonnegative_qp(np.zeros((0, 0)), np.zeros(0), np.zeros(0)).shape == (0,)


def test_inverse_of_a_singular_matrix_gets_a_ridge() -> None:
    matrix = np.array([[1.1, 0.1, 0.3], [0.1, 2.1, 0.2], [0.3, 0.2, 0.9]])
    found = invert(matrix)
    np.testing.assert_allclose(found.diagonal, np.linalg.inv(matrix).diagonal(), rtol=1e-12)
    np.testing.assert_allclose(found.factor.T @ found.factor, matrix, rtol=1e-12)
    assert abs(found.logdet - np.linalg.slogdet(matrix)[1]) < 1e-12 and found.ridge == 0
    twins = np.array([[1.0, 1.0], [1.0, 1.0 - 1e-12]])
    found = invert(twins)
    assert found.ridge == pytest.approx(1e-6, rel=1e-6)
    np.testing.assert_allclose(
        found.diagonal, np.linalg.inv(twins + found.ridge * np.eye(2)).diagonal(), rtol=1e-6
    )


def plain_vi(stats: HsicStats, lam: float) -> np.ndarray:
    """The passes of the specification in the plainest form, with long coordinate descent."""
    g_matrix, b = stats.G.numpy(), stats.b.numpy()
    size, rows, nu = len(b), stats.n * stats.block_size * stats.repeats, 1.5
    a = np.abs(np.linalg.solve(g_matrix, b))
    g, f, sigma2, bound, active, w = (
        np.full(size, 2.0),
        np.ones(size),
        1.0,
        np.inf,
        np.ones(size, dtype=bool),
        np.zeros(size),
    )
    for outer in range(100):
        zeta = (1 + 0.5 * f * g) / (nu + 0.5)
        f = zeta / g
        p = g_matrix + sigma2 * np.diag(f / zeta)
        cov = sigma2 * np.linalg.inv(p)
        if outer == 0:
            w = np.linalg.solve(p, b)
        else:
            w = np.zeros(size)
            w[active] = reference.cyclic_descent(
                p[np.ix_(active, active)], (b - sigma2 * lam * rows / a)[active], 500
            )
        active &= w > 1e-5
        if not active.any():
            break
        g = w**2 + cov.diagonal()
        rss = stats.y2 - 2 * b @ w + w @ g_matrix @ w
        trace = np.trace(g_matrix @ cov)
        sigma2 = (rss + trace) / rows
        new = rss / (2 * sigma2) + np.sum(
            (0.5 * f * g + 1) / zeta + (nu + 0.5) * np.log(zeta) - 0.5 * np.log(f)
        )
        new += (
            -0.5 * np.linalg.slogdet(cov)[1]
            + trace / (2 * sigma2)
            + 0.5 * rows * np.log(2 * np.pi * sigma2)
        )
        if abs(bound - new) <= 1e-5 * abs(new):
            break
        bound = new
    return np.where(active, w, 0.0)


@pytest.mark.parametrize("lam", [0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1.0])
def test_vi_equals_the_plain_passes(lam: float) -> None:
    stats = planted(0)
    result = solve_vi(stats, lam)
    np.testing.assert_allclose(result.omega.numpy(), plain_vi(stats, lam), atol=1e-7)
    assert result.active == int((result.omega > 0).sum())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_vi_count_does_not_grow_with_the_penalty(seed: int) -> None:
    problem = prepare_vi(planted(seed, good=6))
    counts = [solve_vi(problem, lam).active for lam in np.logspace(-8, 0, 25)]
    assert counts == sorted(counts, reverse=True) and counts[0] >= 6 and counts[-1] == 0


def test_warm_start_does_not_change_the_answer() -> None:
    problem = prepare_vi(planted(1, good=5))
    cold = solve_vi(problem, 1e-4)
    warm = solve_vi(problem, 1e-4, warm=solve_vi(problem, 1e-2).omega)
    torch.testing.assert_close(warm.omega, cold.omega, rtol=0, atol=1e-9)
    assert warm.iterations == cold.iterations and abs(warm.sigma2 / cold.sigma2 - 1) < 1e-9


def test_singular_statistics_use_the_ridge_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (600,), generator=generator)
    x = torch.randn(600, 4, generator=generator)
    x[:, 0] += 3 * labels
    stats = block_statistics(torch.cat([x, x[:, :2]], dim=1), labels, torch.arange(600), seed=0)
    assert float(torch.linalg.cond(stats.G)) > 1e10
    problem = prepare_vi(stats)
    size = 6
    expected = torch.linalg.solve(
        stats.G + 1e-6 * stats.G.trace() / size * torch.eye(size, dtype=torch.float64), stats.b
    ).abs()
    np.testing.assert_allclose(
        problem.adaptive, np.maximum(expected.numpy(), 1e-6 * expected.max().item()), rtol=1e-6
    )
    omega = solve_vi(problem, 1e-3).omega
    assert (
        bool(torch.isfinite(omega).all())
        and float(omega[0] + omega[4]) > 0
        and float(omega[2:4].abs().max()) == 0
    )


def test_features_constant_in_most_blocks_are_dropped() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (600,), generator=generator)
    x = torch.randn(600, 4, generator=generator) + labels.unsqueeze(1)
    x[:, 1] = 2.0
    x[:, 3] = 0.0
    x[0, 3] = 1.0  # varies in a single block of each repeat
    stats = block_statistics(x, labels, torch.arange(600), seed=0)
    for omega in (solve_vi(stats, 1e-6).omega, solve_nnlasso(stats, 1e-3).omega):
        assert float(omega[1]) == 0 and float(omega[3]) == 0 and float(omega[0]) > 0


def test_nnlasso_meets_optimality_conditions_and_shrinks() -> None:
    stats = planted(0, good=5)
    counts = []
    for beta in (0.0, 0.01, 0.1, 0.2, 0.5, 1.0):
        w = solve_nnlasso(stats, beta, tol=0.0).omega
        gradient = stats.G @ w - stats.b + beta
        assert float(gradient[w == 0].min() if (w == 0).any() else 0) > -1e-9
        assert float(gradient[w > 0].abs().max() if (w > 0).any() else 0) < 1e-9
        counts.append(int((w > 0).sum()))
    assert counts == sorted(counts, reverse=True) and counts[-1] == 0


def test_jacobi_agrees_where_it_converges() -> None:
    """Nearly orthogonal features make the matrix diagonally dominant; there the simultaneous update
    has the same fixed point.
    """
    matrix = np.eye(4) + 0.05
    linear = np.array([1.0, 0.5, -0.2, 0.8])
    np.testing.assert_allclose(
        jacobi(matrix, linear, np.zeros(4), tol=1e-9),
        nonnegative_qp(matrix, linear, np.zeros(4)),
        atol=1e-6,
    )
    assert solve_vi(planted(0), 1e-3, inner="jacobi").omega.nonzero().flatten().tolist() == [0, 1]
