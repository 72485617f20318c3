"""Neighbourhood routing: each neighbour spreads one unit of mass over the K factors of its target.

Shapes: N nodes, T targets (all nodes, or a range of them), E directed messages, K factors, C channels per factor.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.nn.messages import message_dots, weighted_sum
from cimage_dist.nn.routing_cpu import can_iterate, iterate_assignments
from cimage_dist.types import EdgeList

EPS = 1e-12


def normalize_factors(x_NKC: Tensor) -> Tensor:
    """x / max(‖x‖, 1e-12) over the channels of each factor; zero rows stay zero."""
    return F.normalize(x_NKC, p=2.0, dim=-1, eps=EPS)


def assignments(l_NKC: Tensor, q_TKC: Tensor, edges: EdgeList, temperature: float) -> Tensor:
    """p[v,u,:] = softmax over k of <l[u,k], q[v,k]> / τ for every message u -> v; [E, K], rows sum to 1 (§2)."""
    return torch.softmax(message_dots(q_TKC, l_NKC, edges.src, edges.dst) / temperature, dim=-1)


def aggregate(l_TKC: Tensor, l_NKC: Tensor, p_EK: Tensor, edges: EdgeList) -> Tensor:
    """q[v,k] = l[v,k] + Σ_u w[v,u]·p[v,u,k]·l[u,k]; [T, K, C] (§2)."""
    if edges.weight is not None:
        p_EK = p_EK * edges.weight.unsqueeze(-1).to(p_EK.dtype)
    return weighted_sum(l_TKC, l_NKC, p_EK, edges.src, edges.dst)


def route(
    x_NKC: Tensor,
    edges: EdgeList,
    iterations: int,
    temperature: float = 1.0,
    init: Literal["uniform", "self"] = "uniform",
    final_norm: bool = False,
    grad: Literal["full", "last"] = "full",
    targets: slice | None = None,
) -> Tensor:
    """One routing layer (§2; DisenGCN's form, with the target's centre in the softmax):

        l = x / ‖x‖;  p⁰ = 1/K  (init="self": p⁰ from q = l, as the paper has it)
        repeat T times:  q = l + Σ_u w·p·l[u];  normalise q except after the last;  p = softmax_k(<l[u], q[v]> / τ)

    grad="last" computes p without gradient and differentiates the final aggregation only.
    `targets` restricts the result to a range of rows; `edges.dst` then counts from its start, `edges.src` stays global, and
    `x_NKC` must be normalised already (done once for all ranges).
    """
    l_NKC = normalize_factors(x_NKC) if targets is None else x_NKC
    l_TKC = l_NKC if targets is None else l_NKC[targets]
    if grad == "last":
        with torch.no_grad():
            p_EK = _assign(l_TKC.detach(), l_NKC.detach(), edges, iterations, temperature, init, is_compiled=can_iterate(l_NKC, edges.dst))
    else:
        p_EK = _assign(l_TKC, l_NKC, edges, iterations, temperature, init, is_compiled=False)
    q_TKC = aggregate(l_TKC, l_NKC, p_EK, edges)
    return normalize_factors(q_TKC) if final_norm else q_TKC


def _assign(l_TKC: Tensor, l_NKC: Tensor, edges: EdgeList, iterations: int, temperature: float, init: str, is_compiled: bool) -> Tensor:
    """The assignments before the last aggregation [E, K]; `is_compiled`: all rounds of a target in one go, which has no gradient."""
    uniform = l_NKC.new_full((edges.dst.numel(), l_NKC.shape[1]), 1.0 / l_NKC.shape[1])
    p_EK = uniform if init == "uniform" else assignments(l_NKC, l_TKC, edges, temperature)
    if is_compiled and iterations > 1:
        return iterate_assignments(l_TKC, l_NKC, edges.src, edges.dst, edges.weight, p_EK, iterations - 1, temperature)
    for _ in range(iterations - 1):
        q_TKC = normalize_factors(aggregate(l_TKC, l_NKC, p_EK, edges))
        p_EK = assignments(l_NKC, q_TKC, edges, temperature)
    return p_EK
