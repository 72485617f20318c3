"""Redundancy loss: equals the formula written out, its gradients autograd's, and nothing breaks at
the edges.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cimage_dist.losses import _SPREAD_EPS as EPS
from cimage_dist.losses import redundancy_loss

MU = 0.03  # large, so that both parts count


def views(n: int = 60, width: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, dtype=torch.float64, generator=generator)
    shared = torch.randn(n, width, dtype=torch.float64, generator=generator) @ mix + 5
    za, zb = (
        shared + 0.3 * torch.randn(n, width, dtype=torch.float64, generator=generator)
        for _ in range(2)
    )
    return za.requires_grad_(), zb.requires_grad_()


def naive(za: Tensor, zb: Tensor, mu: float = MU) -> Tensor:
    """The formula as written, differentiable, without the constant for small batches."""
    n, width = za.shape
    za, zb = ((z - z.mean(0)) / (z.std(0, correction=0) + EPS) for z in (za, zb))
    penalty = za.new_zeros(())
    for z in (za, zb):
        corr = z.T @ z / n
        penalty = penalty + (corr - torch.eye(width)).square().sum()
    return (mu * penalty - (za * zb).mean(0).sum()) / width


def compare(got: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    assert got.item() == pytest.approx(wanted.item(), rel=0, abs=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(got, inputs), torch.autograd.grad(wanted, inputs), strict=True
    ):
        assert float(theirs.abs().max()) > 1e-5
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


def test_plain_form_and_its_gradients():
    za, zb = views()
    compare(redundancy_loss(za, zb, mu=MU), naive(za, zb), (za, zb))


def test_weights_are_multiplicities():
    za, zb = views(40)
    times = torch.arange(40) % 3
    rows = torch.repeat_interleave(times)
    got = redundancy_loss(za, zb, mu=MU, weight=times.float())
    compare(got, naive(za[rows], zb[rows]), (za, zb))


def test_gradients_by_finite_differences():
    za, zb = views(30, 4)
    torch.autograd.gradcheck(lambda a, b: redundancy_loss(a, b, mu=MU), (za, zb))


def test_constant_channels_add_nothing():
    za, zb = (z.detach() for z in views())
    za2, zb2 = (
        torch.cat([z, torch.full((60, 2), 7.3, dtype=z.dtype)], 1).requires_grad_()
        for z in (za, zb)
    )
    got = redundancy_loss(za2, zb2, mu=MU)
    assert float(got) == pytest.approx(float(naive(za, zb)) * 6 / 8, rel=0, abs=1e-12)
    grad = torch.autograd.grad(got, za2)[0]
    assert torch.isfinite(grad).all() and not grad[:, 6:].any() and grad[:, :6].any()
    collapsed = torch.full((9, 3), 100.1, requires_grad=True)
    value = redundancy_loss(collapsed, collapsed)
    assert float(value) == 0 and not torch.autograd.grad(value, collapsed)[0].any()


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_rows_give_zero_attached_to_the_graph(rows):
    za, zb = (torch.randn(rows, 4, requires_grad=True) for _ in range(2))
    value = redundancy_loss(za, zb)
    assert float(value) == 0 and value.requires_grad
    value.backward()
    assert za.grad is not None and torch.isfinite(za.grad).all() and not za.grad.any()


def test_nan_is_not_hidden():
    za, zb = views()
    bad = za.detach().clone()
    bad[3, 2] = torch.nan
    assert torch.isnan(redundancy_loss(bad, zb.detach()))


def test_penalty_of_independent_channels_does_not_grow_in_small_batches():
    """64 channels, 128 rows: chance alone would give a penalty of 64·63/127 ≈ 32 in each view."""
    generator = torch.Generator().manual_seed(1)
    width, n = 64, 128
    expected = width * (width - 1) / (n - 1)
    found = []
    for _ in range(20):
        z = torch.randn(n, width, dtype=torch.float64, generator=generator)
        found.append(
            width * float(redundancy_loss(z, z, mu=1.0) - redundancy_loss(z, z, mu=0.0)) / 2
        )
    assert abs(sum(found) / len(found)) < 0.02 * expected
    # With rows enough nothing is subtracted, so the value is the plain formula's.
    za, zb = views(4 * 6, 6)
    assert float(redundancy_loss(za, zb, mu=MU)) == pytest.approx(
        float(naive(za, zb)), rel=0, abs=1e-12
    )
    few = views(4 * 6 - 1, 6)
    assert float(redundancy_loss(*few, mu=MU)) == pytest.approx(
        float(naive(*few)) - 2 * MU * 5 / 22, rel=0, abs=1e-12
    )


def test_single_precision_and_bfloat16():
    za, zb = views(300, 8)
    wanted = float(naive(za, zb))
    assert float(redundancy_loss(za.float(), zb.float(), mu=MU)) == pytest.approx(wanted, rel=1e-5)
    half = redundancy_loss(za.bfloat16(), zb.bfloat16(), mu=MU)
    assert half.dtype == torch.float32 and float(half) == pytest.approx(wanted, rel=0.05)
