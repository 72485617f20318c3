"""Sparse products and features against the same with dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cimage_dist.baselines import sparse
from cimage_dist.baselines.sparse import Pattern, Sparse


def bag_of_words() -> Tensor:
    """[12, 30], one entry in ten; row 3 and column 5 are empty."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(12, 30, dtype=torch.float64, generator=generator)
    x = x * (torch.rand(12, 30, generator=generator) < 0.1)
    x[3], x[:, 5] = 0, 0
    return x


def weight_of(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (4, x.shape[1])
    return torch.randn(shape, dtype=x.dtype, generator=generator).requires_grad_()


def as_dense(pattern: Pattern, values: Tensor) -> Tensor:
    return values.new_zeros(pattern.shape).index_put((pattern.row, pattern.column), values)


@pytest.mark.parametrize("is_part", [False, True])
def test_product_and_both_gradients(is_part: bool) -> None:
    row, column = bag_of_words().nonzero().t()
    pattern = Pattern.of_sorted(row, column, (12, 30))
    if is_part:
        pattern = pattern.only(torch.arange(row.numel()) % 3 > 0)
    values = torch.randn(pattern.row.numel(), dtype=torch.float64, requires_grad=True)
    dense = torch.randn(30, 5, dtype=torch.float64, requires_grad=True)
    results = [pattern.times(values, dense), as_dense(pattern, values) @ dense]
    torch.testing.assert_close(*results)
    slopes = [torch.autograd.grad(r.square().sum(), [values, dense]) for r in results]
    torch.testing.assert_close(*slopes)


def test_pattern_of_edges_has_targets_as_rows_and_loops() -> None:
    edges = torch.tensor([[2, 0, 1], [0, 1, 2]])
    pattern = Pattern.of_edges(edges, 3)
    expected = torch.tensor([[1.0, 0, 1], [1, 1, 0], [0, 1, 1]])
    assert torch.equal(as_dense(pattern, torch.ones(6)), expected)
    bare = Pattern.of_edges(edges, 3, loops=False)
    assert torch.equal(as_dense(bare, torch.ones(3)), expected - torch.eye(3))


def test_features_give_the_same_stored_either_way() -> None:
    x, rows = bag_of_words(), torch.tensor([7, 0, 3])
    stored, weight = sparse.compact(x), weight_of(x)
    assert isinstance(stored, Sparse)
    factor = torch.rand(12, dtype=torch.float64, requires_grad=True)
    content = torch.randn(3, 30, dtype=torch.float64, requires_grad=True)
    columns = (torch.arange(30) % 2).double()
    results = []
    for features in (stored, x):
        seen = sparse.scaled_columns(sparse.scaled_rows(features, factor), columns)
        drop = {"rate": 0.5, "training": False}
        plain = sparse.projected(sparse.dropout(seen, **drop), weight)
        replaced = sparse.projected_with_rows(seen, weight, rows, content, **drop)
        results.append(plain.square().sum() + replaced.pow(3).sum())
    torch.testing.assert_close(*results)
    wanted = [weight, factor, content]
    torch.testing.assert_close(*[torch.autograd.grad(r, wanted) for r in results])


def test_dropout_keeps_the_mean_and_drops_entries() -> None:
    torch.manual_seed(0)
    stored = sparse.compact(bag_of_words())
    assert isinstance(stored, Sparse)
    drawn = [sparse.dropout(stored, 0.3, True) for _ in range(2000)]
    values = torch.stack([one.values for one in drawn if isinstance(one, Sparse)])
    assert abs((values == 0).double().mean() - 0.3) < 0.02
    torch.testing.assert_close(values.mean(0), stored.values, rtol=0.1, atol=0)


def test_dense_features_stay_dense() -> None:
    x = torch.rand(5, 4)
    assert sparse.compact(x) is x
