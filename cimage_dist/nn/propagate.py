"""Personalised-PageRank propagation of unit factors: the weight-free layers behind the projection.

    h ← (1-α)·Â h + α·h⁰,   Â = D̂^-1/2 (A + I) D̂^-1/2,   D̂ the degrees of A + I

Shapes: N nodes, T targets (a prefix of the nodes), E directed messages, D numbers per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cimage_dist.nn.messages import Grouped, add_weighted, gcn_weights
from cimage_dist.types import EdgeList, Hops


class _Step(NamedTuple):
    """One application of Â: the first `messages` messages, into the first `targets` rows."""

    messages: int
    targets: int


def propagate(
    h_NKC: Tensor, edges: EdgeList, alpha: float, steps: int, hops: Hops | None = None
) -> Tensor:
    """`steps` times h ← (1-α)·Â h + α·h⁰, from h = h⁰ = h_NKC.

    With `hops` the messages reach only so far: the number of applications is at most the number
    of hops, and each stops at the nodes from which its output still reaches a seed; the result
    has the seeds' rows alone. The map is linear, so nothing but the weights is kept for the
    backward pass, whatever the number of steps.
    """
    flat = h_NKC.flatten(1)
    weight, own = gcn_weights(edges, flat.dtype)
    if hops is None:
        plan = [_Step(edges.src.numel(), flat.shape[0])] * steps
    else:
        reach = min(steps, len(hops.messages))
        plan = [
            _Step(sum(hops.messages[: depth + 1]), sum(hops.nodes[: depth + 1]))
            for depth in reversed(range(reach))
        ]
    out = cast(Tensor, _Propagate.apply(flat, weight, own, edges.src, edges.dst, alpha, plan))
    return out.view(-1, *h_NKC.shape[1:])


class RowPropagation:
    """`propagate` of a range of target rows, an application of Â at a time: for callers that hold
    some rows of every layer and get the others elsewhere. The same bits.
    """

    def __init__(
        self, edges: EdgeList, degree_N: Tensor, targets: slice, alpha: float, dtype: torch.dtype
    ) -> None:
        """`edges.dst` counts from the start of `targets`; degrees are those of A + I."""
        weight, self.own = gcn_weights(edges, dtype, degree_N, targets)
        self.edges, self.targets, self.alpha = edges, targets, alpha
        self.scaled, self.grouped = weight * (1 - alpha), Grouped()

    def __call__(self, h_NKC: Tensor, start_TKC: Tensor) -> Tensor:
        """[T, K, C] from all rows of the layer before and the targets' rows of h⁰."""
        flat, edges = h_NKC.flatten(1), self.edges
        return _apply(
            flat[self.targets],
            start_TKC.flatten(1),
            self.own,
            self.alpha,
            edges.dst,
            flat,
            edges.src,
            self.scaled,
            self.grouped,
        ).view(-1, *h_NKC.shape[1:])


def _apply(
    h_TD: Tensor,
    start_TD: Tensor,
    own_T: Tensor,
    alpha: float,
    dst: Tensor,
    h_ND: Tensor,
    src: Tensor,
    scaled_E: Tensor,
    grouped: Grouped,
) -> Tensor:
    """(1-α)·Â h + α·h⁰ of the targets; `scaled` are the messages' weights times 1-α."""
    out = h_TD * (own_T * (1 - alpha)).unsqueeze(1)
    out.add_(start_TD, alpha=alpha)
    return add_weighted(out, dst, h_ND, src, scaled_E, grouped)


class _Propagate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h0_ND: Tensor,
        weight_E: Tensor,
        own_N: Tensor,
        src: Tensor,
        dst: Tensor,
        alpha: float,
        plan: list[_Step],
    ) -> Tensor:
        ctx.save_for_backward(weight_E, own_N, src, dst)
        ctx.alpha, ctx.plan, ctx.num_nodes = alpha, plan, h0_ND.shape[0]
        h, grouped = h0_ND, Grouped()
        scaled = weight_E * (1 - alpha)
        for messages, targets in plan:
            h = _apply(
                h[:targets],
                h0_ND[:targets],
                own_N[:targets],
                alpha,
                dst[:messages],
                h,
                src[:messages],
                scaled[:messages],
                grouped,
            )
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight_E, own_N, src, dst = ctx.saved_tensors
        grad, into, grouped = grads[0].contiguous(), 1 - ctx.alpha, Grouped()
        scaled = weight_E * into
        start = grad.new_zeros((ctx.num_nodes, grad.shape[1]))
        sizes = [ctx.num_nodes, *(step.targets for step in ctx.plan[:-1])]
        for (messages, targets), rows in zip(reversed(ctx.plan), reversed(sizes), strict=True):
            start[:targets].add_(grad, alpha=ctx.alpha)
            back = grad.new_zeros((rows, grad.shape[1]))
            back[:targets] = grad * (own_N[:targets] * into).unsqueeze(1)
            grad = add_weighted(
                back, src[:messages], grad, dst[:messages], scaled[:messages], grouped
            )
        return start.add_(grad), None, None, None, None, None, None
