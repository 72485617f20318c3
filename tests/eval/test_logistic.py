"""The regression behind every node score: its optimum, its reduction to few rows, and its
mini-batches.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from cimage_dist.eval import logistic
from cimage_dist.eval.logistic import STRENGTHS, logistic_path, unit_rows


def problem(
    rows: int, width: int, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Overlapping classes on unit rows."""
    generator = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    x = (
        np.eye(classes)[y] @ generator.normal(size=(classes, width))
        + 1.5 * generator.normal(size=(rows, width))
        + 1.0
    )
    return unit_rows(torch.from_numpy(x)), y


def objective(
    weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray, strength: float
) -> float:
    logits = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    return strength * float(logistic._cross_entropy(logits[None], y)[0]) + 0.5 * float(
        (weight.astype(np.float64) ** 2).sum()
    )


@pytest.mark.parametrize(("rows", "width"), [(60, 200), (200, 20)], ids=["wide", "tall"])
def test_the_optimum_is_scikit_learns(rows: int, width: int) -> None:
    x, y = problem(rows, width)
    path = logistic_path(x, y, 3)
    assert path.strengths == STRENGTHS
    for at, strength in enumerate(STRENGTHS):
        other = LogisticRegression(C=strength, tol=1e-8, max_iter=100_000).fit(
            x.astype(np.float64), y
        )
        ours = objective(path.weight[at], path.bias[at], x, y, strength)
        theirs = objective(other.coef_, other.intercept_, x, y, strength)
        assert ours == pytest.approx(theirs, rel=1e-4)
        logits = x @ path.weight[at].T + path.bias[at]
        share = np.exp(logits - logits.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        assert np.abs(share - other.predict_proba(x)).max() < (1e-4 if strength <= 10 else 1e-2)


def test_the_gradient_is_zero_at_the_optimum() -> None:
    x, y = problem(200, 20)
    path = logistic_path(x, y, 3)
    for at, strength in enumerate(STRENGTHS):
        logits = torch.from_numpy(x @ path.weight[at].T + path.bias[at]).double()
        pull = (
            logits.softmax(1) - torch.nn.functional.one_hot(torch.from_numpy(y), 3)
        ).numpy() / len(y)
        slope = pull.T @ x + path.weight[at] / (strength * len(y))
        assert np.abs(slope).max() < 2e-5 and np.abs(pull.sum(0)).max() < 2e-5


def test_the_reduction_to_the_rows_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = problem(50, 120)
    reduced = logistic_path(x, y, 3, STRENGTHS[:5])
    monkeypatch.setattr(logistic, "_MOST_REDUCED", 0)
    direct = logistic_path(x, y, 3, STRENGTHS[:5])
    np.testing.assert_allclose(reduced.weight, direct.weight, atol=2e-3)
    np.testing.assert_allclose(reduced.bias, direct.bias, atol=2e-3)


@pytest.mark.parametrize(("rows", "width"), [(50, 120), (120, 50)])
def test_sparse_rows(rows: int, width: int) -> None:
    x, y = problem(rows, width)
    x = np.where(np.abs(x) > 0.1, x, 0.0).astype(np.float32)
    dense, thin = (
        logistic_path(x, y, 3, STRENGTHS[:5]),
        logistic_path(sparse.csr_matrix(x), y, 3, STRENGTHS[:5]),
    )
    np.testing.assert_allclose(thin.weight, dense.weight, atol=2e-3)
    np.testing.assert_allclose(thin.logits(sparse.csr_matrix(x)), dense.logits(x), atol=2e-3)


def test_single_precision_finds_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = problem(300, 20)
    exact = logistic_path(x, y, 3)
    monkeypatch.setattr(logistic, "_MOST_DOUBLE", 0)
    single = logistic_path(x, y, 3)
    for at, strength in enumerate(STRENGTHS):
        found, best = (objective(p.weight[at], p.bias[at], x, y, strength) for p in (single, exact))
        assert found == pytest.approx(best, rel=1e-4)


def test_mini_batches_come_close_to_the_optimum() -> None:
    x, y = problem(6000, 30, classes=5)
    exact, batched = logistic_path(x, y, 5), logistic_path(x, y, 5, most_exact=1000)
    hits = [path.scores(x, y)[0] for path in (exact, batched)]
    assert np.abs(hits[0] - hits[1]).max() < 0.005 * len(y)
    for at, strength in enumerate(STRENGTHS):
        found, best = (
            objective(p.weight[at], p.bias[at], x, y, strength) for p in (batched, exact)
        )
        assert best * (1 - 1e-5) <= found < best * 1.005


def test_mini_batches_are_a_function_of_the_rows_and_leave_the_global_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "_STEPS", 40)
    x, y = problem(5000, 8)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    a = logistic_path(x, y, 3, most_exact=1000)
    assert torch.equal(state, torch.get_rng_state())
    with torch.inference_mode():
        b = logistic_path(x, y, 3, most_exact=1000)
    np.testing.assert_array_equal(a.weight, b.weight)


def test_unit_rows_of_zero_are_zero() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    expected = np.array([[0.6, 0.8], [0.0, 0.0]], dtype=np.float32)
    np.testing.assert_allclose(unit_rows(x), expected)
    np.testing.assert_allclose(unit_rows(x.to_sparse()).toarray(), expected)
