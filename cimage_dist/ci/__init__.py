"""Scores of factors from the weights of their channels (§7.7). Shapes: K factors of c channels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cimage_dist import keyed

Features = Literal["channel", "factor_mean"]


def score_features(h: Tensor, features: Features = "channel") -> Tensor:
    """The columns HSIC looks at: all channels [n, K·c] (paper) or the mean of each factor [n, K]
    (released code). h [n, K, c].
    """
    return h.flatten(1) if features == "channel" else h.mean(dim=2)


def factor_scores(omega: Tensor, num_factors: int, features: Features = "channel") -> Tensor:
    """`Sc_k = ω̄_k / max ω̄`, ω̄_k the mean weight of the factor's channels; all zero when ω is
    (§7.7). omega [D] -> [K].
    """
    mean = factor_means(omega, num_factors, features)
    top = mean.max()
    return mean / top if top > 0 else torch.zeros_like(mean)


def factor_means(values: Tensor, num_factors: int, features: Features = "channel") -> Tensor:
    """Per-factor mean of a per-feature quantity. values [D] -> [K]."""
    return values.reshape(num_factors, -1).mean(dim=1) if features == "channel" else values


def random_half(num_factors: int, seed: int) -> Tensor:
    """A keyed random choice of ⌊K/2⌋ factors (at least one) as F1, bool [K]."""
    order = torch.argsort(keyed.bits(keyed.stream(seed, "ci-fallback"), torch.arange(num_factors)))
    chosen = torch.zeros(num_factors, dtype=torch.bool)
    chosen[order[: max(num_factors // 2, 1)]] = True
    return chosen
