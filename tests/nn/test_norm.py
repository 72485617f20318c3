"""Batch normalisation: training stores no moments, `settle` stores those of the clean features."""

import torch
from torch import nn

from cimage_dist.nn.projection import BatchNorm, compact, settle
from cimage_dist.types import SparseRows


def test_settled_moments_are_those_of_all_rows():
    """In eval mode the outputs then are what training mode gives for the whole matrix at once; a
    norm without running moments is left alone.
    """
    torch.manual_seed(0)
    x, linear, norm = torch.rand(500, 7).double(), nn.Linear(7, 5).double(), BatchNorm(5).double()
    whole = BatchNorm(5).double()(linear(x))
    before = norm.eval()(linear(x))
    settle(norm, linear, x, rows=64)
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var, linear(x).var(0))
    torch.testing.assert_close(
        norm(linear(x)), whole, rtol=2e-3, atol=2e-3
    )  # the variance of a sample, not of the population
    assert not torch.allclose(before, whole, atol=0.1)
    layer = nn.LayerNorm(5)
    settle(layer, linear, x)
    assert torch.equal(layer.weight, torch.ones(5))


def test_sparse_rows_settle_as_dense_ones():
    torch.manual_seed(0)
    x = torch.rand(300, 40) * (torch.rand(300, 40) < 0.05)
    linear, dense, sparse = nn.Linear(40, 6), BatchNorm(6), BatchNorm(6)
    rows = compact(x)
    assert isinstance(rows, SparseRows)
    settle(dense, linear, x)
    settle(sparse, linear, rows)
    torch.testing.assert_close(sparse.state_dict(), dense.state_dict())


def test_training_neither_reads_nor_changes_the_stored_moments():
    torch.manual_seed(0)
    y, norm = torch.rand(50, 5), BatchNorm(5)
    settle(norm, nn.Linear(7, 5), torch.rand(90, 7))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    for reduce in (None, lambda packed: packed):
        norm.reduce = reduce
        torch.testing.assert_close(norm(y), nn.BatchNorm1d(5)(y))
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)
