"""Normalisation after the projection: over the rows at hand, by the closed form of the whole graph, or per row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cimage_dist.types import FeatureMoments


class MomentsNorm(nn.Module):
    """Batch normalisation of Linear(dropout(x)) with the moments of the *whole graph*, in closed form (§2):

        mean = W x̄ + b,    variance = diag(W (Σ_x + p/(1-p)·diag(E[x²])) Wᵀ)

    No communication and no dependence on which rows were sampled; gradients flow through W and b as in batch normalisation.
    In eval mode p = 0. `linear` is the projection whose output is normalised; it is not registered again here.
    """

    mean: Tensor
    sqmean: Tensor
    cov: Tensor

    def __init__(self, linear: nn.Linear, moments: FeatureMoments, dropout: float, eps: float = 1e-5) -> None:
        super().__init__()
        self._linear = [linear]  # in a list, so that its parameters are not listed twice
        cov = moments.cov_factor if moments.cov is None else moments.cov
        assert cov is not None
        # Saved with the weights: a trained model embeds other graphs with the moments it was trained with.
        self.register_buffer("mean", moments.mean.float())
        self.register_buffer("sqmean", moments.sqmean.float())
        self.register_buffer("cov", cov.float())
        self.is_factor = moments.cov is None
        self.dropout = dropout
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(linear.out_features))
        self.bias = nn.Parameter(torch.zeros(linear.out_features))

    def forward(self, y: Tensor) -> Tensor:
        w = self._linear[0].weight
        dtype = w.dtype
        mean = w @ self.mean.to(dtype) + self._linear[0].bias
        cov = self.cov.to(dtype)
        variance = (w @ cov.t()).square().sum(1) if self.is_factor else ((w @ cov) * w).sum(1)
        if self.training and self.dropout > 0:
            variance = variance + self.dropout / (1 - self.dropout) * (w.square() @ self.sqmean.to(dtype))
        scale = (variance.clamp_min(0) + self.eps).rsqrt() * self.weight  # first, so that one pass over the rows is enough
        return (y - mean) * scale + self.bias


def make_norm(kind: str, linear: nn.Linear, dropout: float, moments: FeatureMoments | None) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm1d(linear.out_features)
    if kind == "layer":
        return nn.LayerNorm(linear.out_features)
    if moments is None:
        raise ValueError("norm 'moments' needs the feature moments of the graph")
    return MomentsNorm(linear, moments, dropout)
