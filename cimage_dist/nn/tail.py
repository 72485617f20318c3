"""One parameter-free graph-convolutional smoothing, and its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from cimage_dist.nn.messages import weighted_sum
from cimage_dist.types import EdgeList


def gcn_weights(edges: EdgeList, dtype: torch.dtype, degree: Tensor | None = None, targets: slice | None = None) -> tuple[Tensor, Tensor]:
    """(weight [E] of the messages, weight [T] of a target's own row) of D̂^-1/2 (A + I) D̂^-1/2.

    D̂ are the degrees of A + I. Message weights count as multiplicities: a neighbour standing for
    w others adds w to the degree. `targets` restricts the result to a range of rows (`edges.dst`
    then counts from its start); `degree` [N] of A + I must be given with it, and is counted from
    the messages where nobody gives it.
    """
    ones = torch.ones(edges.src.numel(), dtype=dtype, device=edges.src.device)
    if edges.weight is not None:
        ones = edges.weight.to(dtype)
    if degree is None and edges.degree is not None:
        degree = edges.degree + 1
    if degree is None:
        degree = ones.new_ones(edges.num_nodes).index_add(0, edges.dst, ones)
    scale = degree.to(dtype).rsqrt()
    at = scale if targets is None else scale[targets]
    return scale[edges.src] * at[edges.dst] * ones, at.square()


def gcn_smooth(q: Tensor, edges: EdgeList, degree: Tensor | None = None, targets: slice | None = None) -> Tensor:
    """z = D̂^-1/2 (A + I) D̂^-1/2 q (§4.4, released code); q is [N, ...]. Arguments: `gcn_weights`."""
    flat = q.flatten(1)
    weight, own = gcn_weights(edges, flat.dtype, degree, targets)
    rows = flat if targets is None else flat[targets]
    smoothed = weighted_sum(rows * own.unsqueeze(1), flat, weight, edges.src, edges.dst)
    return smoothed.view(smoothed.shape[0], *q.shape[1:])
