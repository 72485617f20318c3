"""Normalisation after the projection: over the rows at hand, by the closed form of the whole graph,
or per row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cimage_dist.nn.features import placed, project_rows
from cimage_dist.types import FeatureMoments, Features


class MomentsNorm(nn.Module):
    """Batch normalisation of Linear(dropout(x)) with the moments of the *whole graph*, in closed
    form (§4.2):

        mean = W x̄ + b,    variance = diag(W (Σ_x + p/(1-p)·diag(E[x²])) Wᵀ)

    No communication and no dependence on which rows were sampled; gradients flow through W and b as
    in batch normalisation. In eval mode p = 0. `linear` is the projection whose output is
    normalised; it is not registered again here.
    """

    mean: Tensor
    sqmean: Tensor
    cov: Tensor

    def __init__(
        self, linear: nn.Linear, moments: FeatureMoments, dropout: float, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self._linear = [linear]  # in a list, so that its parameters are not listed twice
        cov = moments.cov_factor if moments.cov is None else moments.cov
        assert cov is not None
        # Saved with the weights: a trained model embeds other graphs with the moments it was
        # trained with.
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
            variance = variance + self.dropout / (1 - self.dropout) * (
                w.square() @ self.sqmean.to(dtype)
            )
        scale = (
            variance.clamp_min(0) + self.eps
        ).rsqrt() * self.weight  # first, so that one pass over the rows is enough
        return (y - mean) * scale + self.bias


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation whose moments may be those of all ranks' rows together, on CPU and GPU
    alike (§4.2).

    Training normalises by the moments of the rows at hand and stores nothing. Eval mode uses the
    moments that `settle` stored: an average over training steps would mix old weights and dropped
    inputs into them. `reduce` sums a tensor over ranks with a gradient that sums too; None: this
    process's rows only. y [n, D].
    """

    reduce: Callable[[Tensor], Tensor] | None = None

    def forward(self, y: Tensor) -> Tensor:
        if not self.training:
            return super().forward(y)
        if self.reduce is None:
            return F.batch_norm(y, None, None, self.weight, self.bias, training=True, eps=self.eps)
        wide = y.to(torch.float64)
        packed = self.reduce(
            torch.cat([wide.sum(0), wide.square().sum(0), wide.new_full((1,), y.shape[0])])
        )
        mean, square = packed[:-1].view(2, -1) / packed[-1]
        variance = (square - mean.square()).clamp_min(0)
        scale = (variance + self.eps).rsqrt().to(y.dtype) * self.weight
        return (y - mean.to(y.dtype)) * scale + self.bias


@torch.no_grad()
def settle(norm: nn.Module, linear: nn.Linear, x: Features, rows: int = 1 << 14) -> None:
    """Store in batch normalisation the moments of y = W x + b over the rows of x.

    `mean = (1/N) Σ_i y_i`, `variance = (1/(N-1)) Σ_i (y_i - mean)²`, without dropout, in double
    precision. Other kinds of norm store no moments and are left alone. x [N, F], dense or sparse.
    """
    if not isinstance(norm, BatchNorm):
        return
    count, weight = x.shape[0], linear.weight
    total, square = (weight.new_zeros(linear.out_features, dtype=torch.float64) for _ in range(2))
    is_whole = not isinstance(x, Tensor) and weight.device.type == "cpu"
    for part in [x] if is_whole else x.split(rows):
        wide = project_rows(placed(part, weight.device, weight.dtype), linear, 0.0, False).double()
        total += wide.sum(0)
        square += wide.square().sum(0)
    mean = total / count
    variance = (square / count - mean.square()).clamp_min(0) * count / max(1, count - 1)
    for stored, found in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert stored is not None
        stored.copy_(found)


def make_norm(
    kind: str, linear: nn.Linear, dropout: float, moments: FeatureMoments | None
) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "batch":
        return BatchNorm(linear.out_features)
    if kind == "layer":
        return nn.LayerNorm(linear.out_features)
    if moments is None:
        raise ValueError("norm 'moments' needs the feature moments of the graph")
    return MomentsNorm(linear, moments, dropout)
