"""Loss terms as (sum, count) pairs, so that several processes can add them up before dividing."""

from __future__ import annotations

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
        cosine = F.cosine_similarity(
            (target * chosen).flatten(1), (predicted_nKC * chosen).flatten(1), dim=-1, eps=EPS
        ).unsqueeze(1)
    else:
        cosine = F.cosine_similarity(target, predicted_nKC, dim=-1, eps=EPS)[:, target_K]
    return _weighted((1 - cosine).clamp_min(0).pow(cfg.sce_power).mean(1), weight)


def target_factors(in_context_K: Tensor, cfg: LossConfig) -> Tensor:
    """bool [K]: the factors to be predicted; the others are the input."""
    return ~in_context_K if cfg.factor_direction == "paper" else in_context_K
