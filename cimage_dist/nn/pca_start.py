"""Start of the projection from the principal directions of the features.

A random projection discards information that training does not recover; the principal directions
keep most of it from the first step. Shapes: F features, D = K·C channels, r directions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cimage_dist import keyed
from cimage_dist.types import FeatureMoments

_EXACT_BELOW = 1024  # features up to which the eigenvectors are computed exactly
_OVERSAMPLE, _POWER = 64, 6
_RANK = 1e-10  # share of the largest variance below which a direction counts as absent


def _gaussian(key: int, rows: int, columns: int) -> Tensor:
    """Keyed normal draws, float64 [rows, columns] (Box-Muller)."""
    ids = torch.arange(rows * columns)
    radius = (-2 * (1 - keyed.uniform(keyed.derive(key, 0), ids)).log()).sqrt()
    return (radius * (2 * torch.pi * keyed.uniform(keyed.derive(key, 1), ids)).cos()).view(rows, columns)


def principal_directions(moments: FeatureMoments, count: int, key: int, power: int = _POWER) -> Tensor:
    """At most `count` eigenvectors of the feature covariance, largest first; float64 [r, F].

    Directions without variance are left out. Wide covariances take a randomised subspace
    iteration (Halko, Martinsson & Tropp 2011). Signs: the entry of largest size is positive.
    """
    cov, factor = moments.cov, moments.cov_factor
    num_features = moments.mean.numel()
    if cov is None and num_features <= _EXACT_BELOW:
        assert factor is not None
        cov = factor.t() @ factor
    if cov is not None and num_features <= _EXACT_BELOW:
        values, vectors = torch.linalg.eigh(cov)
    else:
        # Single precision: the iteration orthonormalises after every product.
        wide = (cov if cov is not None else factor).float()  # type: ignore[union-attr]

        def apply(q: Tensor) -> Tensor:
            return wide @ q if cov is not None else wide.t() @ (wide @ q)

        columns = min(count + _OVERSAMPLE, num_features)
        q = _gaussian(key, num_features, columns).float()
        for _ in range(power):
            q = torch.linalg.qr(apply(q)).Q
        values, inner = torch.linalg.eigh((q.t() @ apply(q)).double())
        vectors = q.double() @ inner
    values, vectors = values.flip(0)[:count], vectors.flip(1)[:, :count].t()
    vectors = vectors[values > _RANK * values[:1].clamp_min(0)]
    peak = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return vectors * torch.where(peak < 0, -1.0, 1.0)


@torch.no_grad()
def start_from_pca(linear: nn.Linear, moments: FeatureMoments, seed: int) -> None:
    """W = (V R)ᵀ, b = -W x̄: the D leading directions V [F, r], rotated by a keyed random R.

    R [r, D] holds the first r rows of a random D x D rotation, so that every channel, hence every
    factor, carries a share of every direction in proportion to its deviation; with D above the
    rank r the channels are linearly dependent, and no direction is counted twice. A function of
    the moments and the seed, so equal on all ranks.
    """
    width = linear.out_features
    key = keyed.stream(seed, "init", 1)
    directions = principal_directions(moments, width, key)
    q, r = torch.linalg.qr(_gaussian(keyed.derive(key, 2), width, width))
    rotation = (q * r.diagonal().sign()).t()[: directions.shape[0]]
    weight = rotation.t() @ directions
    linear.weight.copy_(weight)
    linear.bias.copy_(-(weight @ moments.mean))
