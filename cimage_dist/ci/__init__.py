"""Centred, normalised kernels of many small blocks at once, as flat vectors (§7.2, §7.3).

A symmetric B x B matrix is stored as its B(B-1)/2 upper entries, weighted by sqrt(2), followed by
its B diagonal entries, so that the dot product of two such vectors of length B(B+1)/2 is the
Frobenius inner product of the matrices.
Shapes: m blocks, B rows per block, D features, T = B(B+1)/2.

Scores of factors from the weights of their channels (§7.7). Shapes: K factors of c channels.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from cimage_dist import keyed

NORM_EPS = 1e-9
"""Added to the Frobenius norm before dividing by it: a constant feature or a single-class block
becomes zero, not noise.
"""


@lru_cache(maxsize=16)
def _incidence(block_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B, B(B-1)/2], one where the row takes part in the pair; pairs in the order of
    `torch.triu_indices(B, B, 1)`.
    """
    pairs = torch.triu_indices(block_size, block_size, 1, device=device)
    columns = torch.arange(pairs.shape[1], device=device).expand_as(pairs)
    out = torch.zeros(block_size, pairs.shape[1], dtype=dtype, device=device)
    out[pairs, columns] = 1.0
    return out


def packed_size(block_size: int) -> int:
    """T = B(B+1)/2, the length of a packed symmetric block."""
    return block_size * (block_size + 1) // 2


def centred_gaussian(x: Tensor, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """Centred Gaussian kernels of unit bandwidth, one per block and feature, divided by norm + 1e-9
    unless switched off, and the norms.

    `H K H` with `K_ij = exp(-(x_i - x_j)^2 / 2)` (§7.2, §7.3). Centring removes constants, so K - 1
    stands in for K: near-equal rows then keep their digits in single precision too, and a column
    that is constant inside the block gives exact zeros. Shapes: x [m, B, D] standardised, already
    in the precision to compute in; returns packed [m, T, D] and norm [m, D].
    """
    num_blocks, size, width = x.shape
    num_pairs = size * (size - 1) // 2
    packed = x.new_empty(num_blocks, packed_size(size), width)
    upper, diagonal = packed[:, :num_pairs], packed[:, num_pairs:]
    begin = 0
    for i in range(size - 1):  # slices instead of a gather: no second tensor of that size
        end = begin + size - 1 - i
        torch.sub(x[:, i + 1 :], x[:, i : i + 1], out=upper[:, begin:end])
        begin = end
    upper.square_().mul_(-0.5).expm1_()
    incidence = _incidence(size, x.dtype, x.device)
    row_mean = (incidence @ upper) / size
    # K_ij - 1 - half_i - half_j is the doubly centred entry.
    half = row_mean - row_mean.mean(dim=1, keepdim=True) / 2
    upper.baddbmm_(incidence.T.expand(num_blocks, -1, -1), half, alpha=-1.0)
    torch.mul(half, -2.0, out=diagonal)
    norm = (2.0 * (upper * upper).sum(dim=1) + (diagonal * diagonal).sum(dim=1)).sqrt()
    factor = 1.0 / (norm + NORM_EPS) if normalise else torch.ones_like(norm)
    upper *= (factor * math.sqrt(2.0)).unsqueeze(1)
    diagonal *= factor.unsqueeze(1)
    return packed, norm


def centred_delta(labels: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Centred normalised delta kernels of the labels, one per block, divided by norm + 1e-9, and
    the norms.

    `L_ij = 1/n_y` when i and j share label y inside the block, else 0 (§7.2). Its rows sum to one,
    so centring subtracts 1/B. Shapes: labels int64 [m, B]; returns packed [m, T] and norm [m], zero
    exactly for a single-class block.
    """
    size = labels.shape[1]
    same = (labels.unsqueeze(2) == labels.unsqueeze(1)).to(dtype)
    centred = same / same.sum(dim=2, keepdim=True) - 1.0 / size
    i, j = torch.triu_indices(size, size, 1, device=labels.device)
    diagonal = torch.diagonal(centred, dim1=1, dim2=2)
    packed = torch.cat([centred[:, i, j] * math.sqrt(2.0), diagonal], dim=1)
    norm = torch.linalg.vector_norm(packed, dim=1)
    return packed / (norm + NORM_EPS).unsqueeze(1), norm


def u_centred_gaussian(x: Tensor) -> Tensor:
    """U-centred Gaussian kernel of a whole vector per row, for unbiased HSIC: zero diagonal, zero
    row sums.

    `K_ij = exp(-|x_i - x_j|^2 / (2 d))`; `mean(U_1 * U_2) * B/(B-3)` estimates HSIC without bias
    (Song et al. 2012; Székely & Rizzo 2014). The biased form tends to 1 for wide vectors, whose
    kernels are all close to the identity. Shapes: x [m, B, d] -> [m, B, B], B >= 4.
    """
    size, width = x.shape[1], x.shape[2]
    distance = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    off = ~torch.eye(size, dtype=torch.bool, device=x.device)
    kernel = distance.square_().div_(-2.0 * width).exp_() * off
    rows = kernel.sum(dim=2, keepdim=True)
    total = rows.sum(dim=1, keepdim=True)
    centred = (
        kernel
        - rows / (size - 2)
        - rows.transpose(1, 2) / (size - 2)
        + total / ((size - 1) * (size - 2))
    )
    return centred * off


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
