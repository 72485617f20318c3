"""Terms of the objective (§5): hidden edges, hidden factors, redundancy of two views, modularity.

How a term is shared by ranks, so that the ranks' gradients make the exact gradient of the whole:

- edges and factors return (sum, count) pairs, which are added up before dividing;
- the redundancy loss returns this rank's *share*: shares add up to the loss of the global batch
  and their gradients to its gradient, so `world · share` is the loss to give to
  DistributedDataParallel, which averages;
- modularity returns the *worker loss* for gradients that are averaged over ranks: the mean of the
  values is the loss of the whole, the mean of the gradients its exact gradient. Sign and constant
  are the paper's: minimising the loss maximises modularity, and equal embeddings score 0. Nothing
  of size N x N is made.

Shapes: n rows on this rank, K factors of C channels, D channels in all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.comm import Comm
from cimage_dist.config import LossConfig
from cimage_dist.types import EdgeList, Mean

_COSINE_EPS = 1e-8


def _weighted(values: Tensor, weight: Tensor | None) -> Mean:
    if weight is None:
        return Mean(values.sum(), values.numel())
    return Mean((values * weight.to(values.dtype)).sum(), float(weight.sum()))


def structure_loss(
    pos_logits: Tensor,
    neg_logits: Tensor,
    pos_weight: Tensor | None = None,
    neg_weight: Tensor | None = None,
) -> tuple[Mean, Mean]:
    """L_st = mean softplus(-logit) over masked edges + mean softplus(logit) over non-edges (§5.2);
    the two means are separate.

    Weights [n] are 1, or 0 for padding.
    """
    return _weighted(F.softplus(-pos_logits), pos_weight), _weighted(
        F.softplus(neg_logits), neg_weight
    )


class _Cosine(torch.autograd.Function):
    """cos [n] of the flattened rows of a ⊙ m and b ⊙ m, [n, K, C]; m [1, K, 1] is 0 or 1.

    Keeps a and b alone: autograd keeps the masked rows and those of unit length as well.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, mask: Tensor) -> Tensor:
        one, other = ((x * mask).flatten(1) for x in (a, b))
        cosine = F.cosine_similarity(one, other, dim=-1, eps=_COSINE_EPS)
        lengths = [torch.linalg.vector_norm(x, dim=1).clamp(min=_COSINE_EPS) for x in (one, other)]
        ctx.save_for_backward(a, b, mask, cosine, *lengths)
        return cosine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """∂cos/∂a = (b/|b| - cos·a/|a|)/|a|; a row shorter than ε counts as ε long."""
        a, b, mask, cosine, *lengths = ctx.saved_tensors

        def column(x: Tensor) -> Tensor:
            return x.view(-1, 1, 1)

        found: list[Tensor | None] = []
        ends = ((a, b, *lengths), (b, a, *reversed(lengths)))
        for wanted, (own, other, size, far) in zip(ctx.needs_input_grad, ends, strict=False):
            turned = torch.where(size > _COSINE_EPS, cosine * grads[0] / size.square(), 0.0)
            grad = other * column(grads[0] / (size * far)) if wanted else None
            found.append(None if grad is None else grad.addcmul_(own, -column(turned)).mul_(mask))
        return *found, None


def factor_loss(
    z_nKC: Tensor,
    predicted_nKC: Tensor,
    in_context_K: Tensor,
    cfg: LossConfig,
    weight: Tensor | None = None,
) -> Mean:
    """L_ch = mean_v (1 - cos(F2_v, F̂2_v))^τ, scaled cosine error on the hidden factors (§5.3).

    F2 are the factors outside the context (direction "paper") or inside it ("code"). The cosine is
    taken over the flattened F2 of a node, or per factor and then averaged. The target is z,
    with or without gradient (factor_target). An empty F1 or F2 gives 0, attached to the graph so
    that every parameter has a gradient.
    """
    target_K = target_factors(in_context_K, cfg)
    if not target_K.any() or target_K.all():
        # Nothing to predict, or nothing to predict from.
        count = z_nKC.shape[0] if weight is None else float(weight.sum())
        return Mean((z_nKC.sum() + predicted_nKC.sum()) * 0.0, count)
    target = z_nKC if cfg.factor_target == "self" else z_nKC.detach()
    if cfg.factor_cosine == "flat":
        # Zeros in place of the other factors add nothing to a product or a length, and need no
        # gathering.
        chosen = target_K.to(z_nKC.dtype).view(1, -1, 1)
        cosine = cast(Tensor, _Cosine.apply(target, predicted_nKC, chosen)).unsqueeze(1)
    else:
        cosine = F.cosine_similarity(target, predicted_nKC, dim=-1, eps=_COSINE_EPS)[:, target_K]
    return _weighted((1 - cosine).clamp_min(0).pow(cfg.sce_power).mean(1), weight)


def target_factors(in_context_K: Tensor, cfg: LossConfig) -> Tensor:
    """bool [K]: the factors to be predicted; the others are the input."""
    return ~in_context_K if cfg.factor_direction == "paper" else in_context_K


_SPREAD_EPS = 1e-6
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
    is_constant = variance <= (_SPREAD_EPS * (1 + mean.abs())).square()
    deviation = torch.where(is_constant, 1.0, variance).sqrt()
    return torch.where(is_constant, 0.0, 1 / (deviation + _SPREAD_EPS))


def _penalty(gram: Tensor, scale: Tensor, n: Tensor) -> Tensor:
    """‖C - I‖²_F over the channels that vary, less what chance adds in a small batch."""
    varies = (scale != 0).to(scale.dtype)
    corr = gram * scale.unsqueeze(1) * scale
    chance = varies.sum() * (varies.sum() - 1) / (n - 1).clamp(min=1.0)
    is_few = n < _ROWS_PER_CHANNEL * scale.numel()
    return (corr - varies.diag()).square().sum() - torch.where(is_few, chance, 0.0)


def unit_rows(z: Tensor) -> Tensor:
    """Rows divided by max(norm, 1e-12); half-precision inputs are raised to float32 first. z [n,
    D].
    """
    z = z if z.dtype in (torch.float32, torch.float64) else z.to(torch.float32)
    return z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp(min=1e-12)


class _EdgeProducts(torch.autograd.Function):
    """`Σ_e w_e x_src·x_dst` with sparse products in both directions: nothing of size E x D is ever
    stored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: EdgeList, is_symmetric: bool) -> Tensor:
        incoming = _adjacency(edges.dst, edges.src, edges, x) @ x
        ctx.edges = edges
        # Where both directions give the same, the backward pass does not need x.
        ctx.save_for_backward(incoming, None if is_symmetric else x)
        return (x * incoming).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        incoming, x = ctx.saved_tensors
        outgoing = (
            incoming if x is None else _adjacency(ctx.edges.src, ctx.edges.dst, ctx.edges, x) @ x
        )
        return grads[0] * (incoming + outgoing), None, None


def modularity_full(
    z: Tensor, edges: EdgeList, comm: Comm | None = None, *, is_symmetric: bool = False
) -> Tensor:
    """Collective: modularity loss over all edges, each directed edge held by exactly one rank
    (§5.4).

    `L = -(1/2m) [ Σ_{(i,j)} ẑ_i·ẑ_j - |s|²/2m ]`, `s = Σ_i d_i ẑ_i`, `2m = Σ_i d_i`, ẑ the unit
    rows. Worker r returns
    `-(W/2m) [ e_r - (2 s_r·sg(s) - sg(s_r·s))/2m ]` with s_r summed over the targets of its own
    edges. An edge weight counts that often. Shapes: z [num_nodes, D] holds every row this rank's
    edges touch, gradients attached. `is_symmetric` promises that each of this rank's edges is here
    in both directions (always so on one process with a symmetric graph) and saves one sparse
    product in backward.
    """
    comm = comm or Comm()
    x = unit_rows(z)
    degree = torch.bincount(edges.dst, weights=edges.weight, minlength=edges.num_nodes).to(x.dtype)
    local_sum = degree @ x
    products = _EdgeProducts.apply(x, edges, is_symmetric)
    volume = degree.sum(dtype=torch.float64)
    reduced = comm.sum(torch.cat([local_sum.detach().to(torch.float64), volume.unsqueeze(0)]))
    total, two_m = reduced[:-1].to(x.dtype), reduced[-1].clamp(min=1.0).to(x.dtype)
    null_model = (2.0 * (local_sum @ total) - (local_sum.detach() @ total)) / two_m
    return -comm.world * (products - null_model) / two_m


def modularity_edges(
    z_u: Tensor, z_v: Tensor, comm: Comm | None = None, *, is_symmetric: bool = False
) -> Tensor:
    """Collective: unbiased modularity loss from a global batch of B edges drawn uniformly, spread
    over the ranks in any way (§5.4).

    `L = -mean ẑ_u·ẑ_v + (|S|² - Σ|a|²)/(B(B-1))`, `S = Σ a`, a = ẑ_u. Worker r returns
    `W [ -e_r/B + (2 sg(S)·s_r - sg(S·s_r) - Σ_local |a|²)/(B(B-1)) ]`. Undirected seed edges have
    no source: with `is_symmetric`, a = (ẑ_u + ẑ_v)/2. A batch of one edge has no pair to estimate
    the second term, which is then left out; an empty batch gives 0. Shapes: z_u, z_v [b_local, D],
    b_local may be 0.
    """
    comm = comm or Comm()
    u, v = unit_rows(z_u), unit_rows(z_v)
    a = (u + v) / 2 if is_symmetric else u
    local_sum = a.sum(dim=0)
    count = torch.full((1,), float(u.shape[0]), dtype=torch.float64, device=u.device)
    reduced = comm.sum(torch.cat([local_sum.detach().to(torch.float64), count]))
    total, batch = reduced[:-1].to(u.dtype), reduced[-1].to(u.dtype)
    products = (u * v).sum() / batch.clamp(min=1.0)
    pairs = (batch * (batch - 1.0)).clamp(min=1.0)
    null_model = (2.0 * (total @ local_sum) - total @ local_sum.detach() - (a * a).sum()) / pairs
    return comm.world * (torch.where(batch > 1, null_model, 0.0) - products)


def _adjacency(rows: Tensor, columns: Tensor, edges: EdgeList, x: Tensor) -> Tensor:
    """CSR matrix with entry w_e at (rows_e, columns_e); rows need not be sorted."""
    weight = (
        torch.ones(rows.numel(), dtype=x.dtype, device=x.device)
        if edges.weight is None
        else edges.weight.to(x.dtype)
    )
    if rows.numel() and bool((rows[1:] < rows[:-1]).any()):
        order = torch.argsort(rows, stable=True)
        rows, columns, weight = rows[order], columns[order], weight[order]
    indptr = torch.zeros(edges.num_nodes + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(torch.bincount(rows, minlength=edges.num_nodes), 0, out=indptr[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        return torch.sparse_csr_tensor(
            indptr, columns, weight, (edges.num_nodes, edges.num_nodes), check_invariants=False
        )
