"""Neighbourhood routing: each neighbour spreads one unit of mass over the K factors of its target.

Shapes: N nodes, T targets (all nodes, or a range of them), E directed messages, K factors, C
channels per factor.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cimage_dist.errors import UserError
from cimage_dist.nn.kernels.routing_op import is_fused, route_op
from cimage_dist.types import EdgeList

EPS = 1e-12

Backend = Literal["auto", "fused", "reference"]


def normalize_factors(x_NKC: Tensor) -> Tensor:
    """x / max(‖x‖, 1e-12) over the channels of each factor; zero rows stay zero."""
    return F.normalize(x_NKC, p=2.0, dim=-1, eps=EPS)


def use_fused(x: Tensor, backend: Backend) -> bool:
    """Whether routing runs as the fused operator here; asking for it where there is none is an
    error.
    """
    if backend == "fused" and not is_fused(x):
        raise UserError(
            f"model.routing_backend is 'fused', but nothing serves {x.dtype} on "
            f"{x.device.type}. Install triton for a GPU, or use routing_backend=auto."
        )
    return backend != "reference" and is_fused(x)


def route(
    x_NKC: Tensor,
    edges: EdgeList,
    iterations: int,
    temperature: float = 1.0,
    init: Literal["uniform", "self"] = "uniform",
    final_norm: bool = False,
    grad: Literal["full", "last"] = "full",
    targets: slice | None = None,
    backend: Backend = "auto",
    is_unit: bool = False,
) -> Tensor:
    """One routing layer (§4.4; DisenGCN's form, with the target's centre in the softmax):

        l = x / ‖x‖;  p⁰ = 1/K  (init="self": p⁰ from q = l, as the paper has it)
        repeat T times:  q = l + Σ_u w·p·l[u];  normalise q except after the last;  p =
        softmax_k(<l[u], q[v]> / τ)

    grad="last" takes p for a constant and differentiates the final aggregation only.
    `targets` restricts the result to a range of rows; `edges.dst` then counts from its start,
    `edges.src` stays global. `is_unit`: the factors of x are normalised already (done once for all
    ranges).
    """
    if use_fused(x_NKC, backend):
        edges, rows = edges.by_target, range(x_NKC.shape[0])[targets or slice(None)]
        indptr, is_self, is_full = edges.pointers(len(rows)), init == "self", grad == "full"
        q_TKC: Tensor = route_op(
            x_NKC,
            rows.start,
            indptr,
            edges.src,
            edges.weight,
            iterations,
            temperature,
            is_self,
            is_full,
            not is_unit,
        )
    else:
        l_NKC = x_NKC if is_unit else normalize_factors(x_NKC)
        l_TKC = l_NKC if targets is None else l_NKC[targets]
        q_TKC = reference_route(l_TKC, l_NKC, edges, iterations, temperature, init, grad)
    return normalize_factors(q_TKC) if final_norm else q_TKC


def assignments(l_EKC: Tensor, q_TKC: Tensor, dst: Tensor, temperature: float) -> Tensor:
    """p[v,u,:] = softmax over k of <l[u,k], q[v,k]> / τ for every message u -> v; [E, K], rows sum
    to 1 (§4.4).
    """
    return torch.softmax((l_EKC * q_TKC.index_select(0, dst)).sum(-1) / temperature, dim=-1)


def reference_route(
    l_TKC: Tensor,
    l_NKC: Tensor,
    edges: EdgeList,
    iterations: int,
    temperature: float,
    init: Literal["uniform", "self"],
    grad: Literal["full", "last"],
) -> Tensor:
    """The same in plain tensor operations on unit rows: the oracle for the fused backends, and the
    form for devices without one.

    Keeps tensors of E·K·C numbers, with grad="full" several for each iteration.
    """
    l_EKC = l_NKC.index_select(0, edges.src)
    weight = None if edges.weight is None else edges.weight.unsqueeze(-1).to(l_NKC.dtype)

    def aggregate(p_EK: Tensor) -> Tensor:
        scaled = p_EK if weight is None else p_EK * weight
        return l_TKC.index_add(0, edges.dst, scaled.unsqueeze(-1) * l_EKC)

    with torch.set_grad_enabled(torch.is_grad_enabled() and grad == "full"):
        if init == "self":
            p_EK = assignments(l_EKC, l_TKC, edges.dst, temperature)
        else:
            p_EK = l_NKC.new_full((edges.src.numel(), l_NKC.shape[1]), 1.0 / l_NKC.shape[1])
        for _ in range(iterations - 1):
            p_EK = assignments(l_EKC, normalize_factors(aggregate(p_EK)), edges.dst, temperature)
    return aggregate(p_EK)
