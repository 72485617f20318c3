"""Sums along messages, and the weight-free layers behind the projection that are made of them:
personalised-PageRank propagation of unit factors.

    h ← (1-α)·Â h + α·h⁰,   Â = D̂^-1/2 (A + I) D̂^-1/2,   D̂ the degrees of A + I

Nothing of size messages x width is made or kept.

Shapes: N nodes, T targets (a prefix or range of them), E directed messages src -> dst, D numbers
per row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cimage_dist.types import EdgeList, Hops

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
        from cimage_dist.nn.kernels.cpu.routing import group

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
        from cimage_dist.nn.kernels.cpu.routing import sum_messages

        by_target = (grouped or Grouped()).of(to, out.shape[0])
        return sum_messages(out, by_target, x, by, weight_E)
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
