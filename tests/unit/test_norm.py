"""Moments of a norm that was never trained."""

import torch
from torch import nn

from cimage_dist.nn.norm import BatchNorm, settle


def test_settled_moments_are_those_of_all_rows():
    """In eval mode the outputs then are what training mode gives for the whole matrix at once; a norm without running moments is left alone."""
    torch.manual_seed(0)
    x, linear, norm = torch.rand(500, 7).double(), nn.Linear(7, 5).double(), BatchNorm(5).double()
    whole = BatchNorm(5).double()(linear(x))
    before = norm.eval()(linear(x))
    settle(norm, linear, x, rows=64)
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_var, linear(x).var(0))
    torch.testing.assert_close(norm(linear(x)), whole, rtol=2e-3, atol=2e-3)  # the variance of a sample, not of the population
    assert not torch.allclose(before, whole, atol=0.1)
    layer = nn.LayerNorm(5)
    settle(layer, linear, x)
    assert torch.equal(layer.weight, torch.ones(5))
