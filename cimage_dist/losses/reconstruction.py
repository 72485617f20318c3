"""Loss terms as (sum, count) pairs, so that several processes can add them up before dividing."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.config import LossConfig
from cimage_dist.types import Mean

EPS = 1e-8


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
        rows = [(x * mask).flatten(1) for x in (a, b)]
        cosine = F.cosine_similarity(*rows, dim=-1, eps=EPS)
        lengths = [torch.linalg.vector_norm(x, dim=1).clamp(min=EPS) for x in rows]
        ctx.save_for_backward(a, b, mask, cosine, *lengths)
        return cosine

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """∂cos/∂a = (b/|b| - cos·a/|a|)/|a|; a row shorter than EPS counts as EPS long."""
        a, b, mask, cosine, *lengths = ctx.saved_tensors

        def column(x: Tensor) -> Tensor:
            return x.view(-1, 1, 1)

        found: list[Tensor | None] = []
        ends = ((a, b, *lengths), (b, a, *reversed(lengths)))
        for wanted, (own, other, size, far) in zip(ctx.needs_input_grad, ends, strict=False):
            turned = torch.where(size > EPS, cosine * grads[0] / size.square(), 0.0)
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
        cosine = F.cosine_similarity(target, predicted_nKC, dim=-1, eps=EPS)[:, target_K]
    return _weighted((1 - cosine).clamp_min(0).pow(cfg.sce_power).mean(1), weight)


def target_factors(in_context_K: Tensor, cfg: LossConfig) -> Tensor:
    """bool [K]: the factors to be predicted; the others are the input."""
    return ~in_context_K if cfg.factor_direction == "paper" else in_context_K
