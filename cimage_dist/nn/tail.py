"""The tail: one parameter-free graph-convolutional smoothing of the routed factors."""

from __future__ import annotations

from torch import Tensor

from cimage_dist.nn.messages import weighted_sum
from cimage_dist.types import EdgeList


def gcn_smooth(q: Tensor, edges: EdgeList, degree: Tensor | None = None, targets: slice | None = None) -> Tensor:
    """z = D̂^-1/2 (A + I) D̂^-1/2 q (§2, released code), D̂ = degrees of A + I; q is [N, ...].

    Message weights count as multiplicities: a neighbour standing for w others adds w to the degree. `targets` restricts the
    result to a range of rows (`edges.dst` then counts from its start); `degree` [N] of A + I must be given with it.
    """
    flat = q.flatten(1)
    ones = flat.new_ones(edges.src.numel()) if edges.weight is None else edges.weight.to(flat.dtype)
    if degree is None:
        degree = flat.new_ones(edges.num_nodes).index_add(0, edges.dst, ones) if edges.degree is None else edges.degree + 1
    rows = slice(None) if targets is None else targets
    scale = degree.to(flat.dtype).rsqrt()
    weight = scale[edges.src] * scale[rows][edges.dst] * ones
    own = flat[rows] * scale[rows].square().unsqueeze(1)
    smoothed = weighted_sum(own, flat, weight, edges.src, edges.dst)
    return smoothed.view(smoothed.shape[0], *q.shape[1:])
