"""Redundancy loss: two views of a node agree per channel, the channels of a view do not correlate.

Convention: the returned value is this rank's *share*. Shares add up to the loss of the global
batch, and the gradients that the ranks compute from their own rows add up to its exact gradient, so
`world · share` is the loss to give to DistributedDataParallel, which averages.

Shapes: n rows on this rank, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cimage_dist.comm import Comm

EPS = 1e-6
_ROWS_PER_CHANNEL = 4  # with fewer, what chance alone adds to the penalty is subtracted


class _Products(torch.autograd.Function):
    """Σ xa ⊙ xb [D], xaᵀxa and xbᵀxb [D, D] of the centred rows x = √w (z - m), [n, D].

    Centring is done again in the backward pass, which makes one product x (G + Gᵀ) of each Gram
    matrix where autograd makes two.
    """

    @staticmethod
    def forward(
        ctx: Any, za: Tensor, zb: Tensor, mean_a: Tensor, mean_b: Tensor, root: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(za, zb, mean_a, mean_b, root)
        xa, xb = _centred(za, mean_a, root), _centred(zb, mean_b, root)
        return (xa * xb).sum(0), xa.t() @ xa, xb.t() @ xb

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        za, zb, mean_a, mean_b, root = ctx.saved_tensors
        across, gram_a, gram_b = grads
        xa, xb = _centred(za, mean_a, root), _centred(zb, mean_b, root)
        found = []
        for own, other, gram in ((xa, xb, gram_a), (xb, xa, gram_b)):
            grad = (own @ (gram + gram.t())).addcmul_(other, across)
            found.append(grad if root is None else grad.mul_(root))
        return *found, None, None, None


def redundancy_loss(
    za: Tensor,
    zb: Tensor,
    *,
    mu: float = 1e-3,
    weight: Tensor | None = None,
    comm: Comm | None = None,
) -> Tensor:
    """Collective: this rank's share of the redundancy loss of two views of the same nodes.

    `L = (1/D) [ -Σ_d c_d + μ Σ_v ‖C_v - I‖²_F ]` with, over the n rows of *all* ranks,
    z̃ = (z - m)/(s + ε) per channel (m mean, s deviation), c_d = (1/n) Σ z̃ᵃ_d z̃ᵇ_d and
    C_v = (1/n) z̃_vᵀ z̃_v. A constant channel (s = 0) adds nothing.

    Small batches: chance alone gives an independent pair E[C_ij²] = 1/(n-1). When n < 4D that
    expectation, D(D-1)/(n-1) over all pairs, is subtracted from ‖C_v - I‖², so that losses of
    different batch sizes compare. It is a constant: the gradient stays that of the formula above.

    za, zb [n, D]: this rank's rows in the same order; n may be 0. weight [n] >= 0: how often a row
    counts (0: padding).

    Every sum over rows is reduced once, in float64. With u = z - m the loss is a function f(S) of
    the reduced S = Σ u uᵀ / n alone (m drops out of the gradient because Σ u = 0), so a rank needs
    only ∂f/∂S, which all compute alike: nothing is sent in the backward pass.
    """
    comm = comm or Comm()
    za, zb = (z if z.dtype == torch.float64 else z.to(torch.float32) for z in (za, zb))
    root = None if weight is None else weight.to(za.dtype).sqrt().unsqueeze(1)
    n, means = _means(za, zb, root, comm)
    local = list(_Products.apply(za, zb, *means, root))

    def value(c: Tensor, *grams: Tensor) -> Tensor:
        scale = [_scale(s.diagonal(), m) for s, m in zip(grams, means, strict=True)]
        pairs = [_penalty(s, r, n) for s, r in zip(grams, scale, strict=True)]
        return mu * sum(pairs) - (c * scale[0] * scale[1]).sum()

    return _share(value, local, n.clamp(min=1.0), comm) / za.shape[1]


def _share(value: Callable[..., Tensor], local: list[Tensor], count: Tensor, comm: Comm) -> Tensor:
    """Collective: this rank's share of f(Σ_r local_r / count), exact in value and gradient.

    `f/W + <∂f/∂S, S_r - sg(S_r)>`: S = Σ_r S_r, so the local part of the chain rule is all of it.
    """
    flat = torch.cat([part.detach().flatten().to(torch.float64) for part in local])
    reduced = comm.sum(flat).split([part.numel() for part in local])
    with torch.enable_grad():
        sums = [
            (total.view_as(part) / count).requires_grad_()
            for total, part in zip(reduced, local, strict=True)
        ]
        whole = value(*sums)
        slopes = torch.autograd.grad(whole, sums)
    out = (whole.detach() / comm.world).to(local[0].dtype)
    for part, slope in zip(local, slopes, strict=True):
        out = out + ((slope / count).to(part.dtype) * (part - part.detach())).sum()
    return out


def _means(
    za: Tensor, zb: Tensor, root: Tensor | None, comm: Comm
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Collective: (number of rows or sum of weights, the two means [D]), float64."""
    with torch.no_grad():
        if root is None:
            sums, count = [za.sum(0), zb.sum(0)], za.new_full((1,), za.shape[0])
        else:
            weight = root.square().squeeze(1)
            sums, count = [weight @ za, weight @ zb], weight.sum().unsqueeze(0)
        reduced = comm.sum(torch.cat([*sums, count]).to(torch.float64))
    mean_a, mean_b = (reduced[:-1] / reduced[-1].clamp(min=1.0)).chunk(2)
    return reduced[-1], (mean_a, mean_b)


def _centred(z: Tensor, mean: Tensor, root: Tensor | None) -> Tensor:
    """√w (z - m); m is a constant here because its gradient vanishes."""
    x = z - mean.to(z.dtype)
    return x if root is None else x * root


def _scale(variance: Tensor, mean: Tensor) -> Tensor:
    """1/(s + ε) [D]; 0 where the channel is constant up to rounding. NaN stays NaN."""
    is_constant = variance <= (EPS * (1 + mean.abs())).square()
    deviation = torch.where(is_constant, 1.0, variance).sqrt()
    return torch.where(is_constant, 0.0, 1 / (deviation + EPS))


def _penalty(gram: Tensor, scale: Tensor, n: Tensor) -> Tensor:
    """‖C - I‖²_F over the channels that vary, less what chance adds in a small batch."""
    varies = (scale != 0).to(scale.dtype)
    corr = gram * scale.unsqueeze(1) * scale
    chance = varies.sum() * (varies.sum() - 1) / (n - 1).clamp(min=1.0)
    is_few = n < _ROWS_PER_CHANNEL * scale.numel()
    return (corr - varies.diag()).square().sum() - torch.where(is_few, chance, 0.0)
