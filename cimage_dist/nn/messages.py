"""Sums along messages. Nothing of size messages x width is made or kept.

Shapes: N nodes, T targets (a prefix or range of them), E directed messages src -> dst, D numbers
per row.

One parameter-free graph-convolutional smoothing, and its weights.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cimage_dist.types import EdgeList

_CHUNK_FLOATS = (
    1 << 22
)  # gathered at a time where the compiled loops do not apply: 16 MB in single precision


def weighted_sum(
    base_TD: Tensor, x_ND: Tensor, weight_E: Tensor, src: Tensor, dst: Tensor
) -> Tensor:
    """out[v] = base[v] + Σ_{u -> v} w[v,u]·x[u]; [T, D]. The weights are constants: they get no
    gradient.

    Equal to `base.index_add(0, dst, w.unsqueeze(-1) * x[src])`, each target adding its messages in
    their order.
    """
    return cast(Tensor, _WeightedSum.apply(base_TD, x_ND, weight_E, src, dst))


def can_compile(*tensors: Tensor) -> bool:
    """On the CPU, all in single or all in double precision."""
    return all(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == tensors[0].dtype
        for x in tensors
    )


class Grouped:
    """The order of messages by target, found once for calls that share their targets."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], Any] = {}

    def of(self, to: Tensor, num_targets: int) -> Any:
        from cimage_dist.nn.kernels.cpu.messages import group

        key = (to.numel(), num_targets)
        if key not in self._found:
            self._found[key] = group(to.numpy(), num_targets)
        return self._found[key]


def add_weighted(
    out: Tensor, to: Tensor, x: Tensor, by: Tensor, weight_E: Tensor, grouped: Grouped | None = None
) -> Tensor:
    """out[to[e]] += weight[e]·x[by[e]] in place; each target adds its messages in their order.

    `grouped` is kept by a caller whose `to` are prefixes of one list.
    """
    if can_compile(x, weight_E, out):
        from cimage_dist.nn.kernels.cpu.messages import add_messages

        by_target = (grouped or Grouped()).of(to, out.shape[0])
        return add_messages(out, by_target, x, by, weight_E)
    size = max(1, _CHUNK_FLOATS // max(x[:1].numel(), 1))
    for begin in range(0, to.numel(), size):
        part = slice(begin, begin + size)
        out.index_add_(0, to[part], x.index_select(0, by[part]).mul_(weight_E[part].unsqueeze(-1)))
    return out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, base_TD: Tensor, x_ND: Tensor, weight_E: Tensor, src: Tensor, dst: Tensor
    ) -> Tensor:
        ctx.num_nodes = x_ND.shape[0]
        ctx.save_for_backward(weight_E, src, dst)
        return add_weighted(
            base_TD.clone(memory_format=torch.contiguous_format), dst, x_ND, src, weight_E
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        weight_E, src, dst = ctx.saved_tensors
        grad_x = (
            add_weighted(grad.new_zeros((ctx.num_nodes, grad.shape[1])), src, grad, dst, weight_E)
            if ctx.needs_input_grad[1]
            else None
        )
        return grad, grad_x, None, None, None


def gcn_weights(
    edges: EdgeList, dtype: torch.dtype, degree: Tensor | None = None, targets: slice | None = None
) -> tuple[Tensor, Tensor]:
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


def gcn_smooth(
    q: Tensor, edges: EdgeList, degree: Tensor | None = None, targets: slice | None = None
) -> Tensor:
    """z = D̂^-1/2 (A + I) D̂^-1/2 q (§4.4, released code); q is [N, ...]. Arguments:
    `gcn_weights`.
    """
    flat = q.flatten(1)
    weight, own = gcn_weights(edges, flat.dtype, degree, targets)
    rows = flat if targets is None else flat[targets]
    smoothed = weighted_sum(rows * own.unsqueeze(1), flat, weight, edges.src, edges.dst)
    return smoothed.view(smoothed.shape[0], *q.shape[1:])
