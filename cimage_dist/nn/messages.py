"""Sums and inner products along messages, and which messages a layer needs. Nothing of size messages x width is made or kept.

Shapes: N nodes, T targets (a prefix or range of them), E directed messages src -> dst, K factors, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cimage_dist.nn.messages_cpu import add_messages, can_compile, dot_messages
from cimage_dist.types import EdgeList

_CHUNK_FLOATS = 1 << 22  # gathered at a time where the compiled loops do not apply: 16 MB in single precision


class Hops(NamedTuple):
    """A sampled subgraph in order: the number of seeds, of new nodes of each hop, and of messages into the seeds, the first hop, ..."""

    nodes: tuple[int, ...]
    messages: tuple[int, ...]

    def within(self, edges: EdgeList, depth: int) -> tuple[EdgeList, slice]:
        """The messages into nodes at most `depth` hops from a seed, and the rows of those nodes: prefixes of both."""
        end = sum(self.messages[: depth + 1])
        weight = None if edges.weight is None else edges.weight[:end]
        return EdgeList(edges.src[:end], edges.dst[:end], edges.num_nodes, weight, edges.degree), slice(0, sum(self.nodes[: depth + 1]))


def weighted_sum(base_TKC: Tensor, x_NKC: Tensor, p_EK: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """out[v,k] = base[v,k] + Σ_{u -> v} p[v,u,k]·x[u,k]; [T, K, C].

    Equal to `base.index_add(0, dst, p.unsqueeze(-1) * x[src])`, each target adding its messages in their order.
    """
    return cast(Tensor, _WeightedSum.apply(base_TKC, x_NKC, p_EK, src, dst))


def message_dots(q_TKC: Tensor, x_NKC: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """<q[v,k], x[u,k]> for every message u -> v; [E, K]."""
    return cast(Tensor, _MessageDots.apply(q_TKC, x_NKC, src, dst))


def _parts(count: int, x: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_FLOATS // max(x[:1].numel(), 1))
    return (slice(begin, begin + size) for begin in range(0, count, size))


def _add(out: Tensor, to: Tensor, x: Tensor, by: Tensor, p_EK: Tensor) -> Tensor:
    if can_compile(x, p_EK, out):
        return add_messages(out, to, x, by, p_EK)
    for part in _parts(to.numel(), x):
        out.index_add_(0, to[part], x.index_select(0, by[part]).mul_(p_EK[part].unsqueeze(-1)))
    return out


def _dot(a: Tensor, to: Tensor, x: Tensor, by: Tensor) -> Tensor:
    if can_compile(a, x):
        return dot_messages(a, to, x, by)
    parts = [x.index_select(0, by[part]).mul_(a.index_select(0, to[part])).sum(-1) for part in _parts(to.numel(), x)]
    return torch.cat(parts) if parts else x.new_empty((0, x.shape[1]))


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, base_TKC: Tensor, x_NKC: Tensor, p_EK: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        ctx.num_nodes = x_NKC.shape[0]
        ctx.save_for_backward(p_EK, src, dst, x_NKC if ctx.needs_input_grad[2] else None)
        return _add(base_TKC.clone(memory_format=torch.contiguous_format), dst, x_NKC, src, p_EK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        p_EK, src, dst, x_NKC = ctx.saved_tensors
        grad_x = _add(grad.new_zeros((ctx.num_nodes, *grad.shape[1:])), src, grad, dst, p_EK) if ctx.needs_input_grad[1] else None
        grad_p = _dot(grad, dst, x_NKC, src) if ctx.needs_input_grad[2] else None
        return grad, grad_x, grad_p, None, None


class _MessageDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TKC: Tensor, x_NKC: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        ctx.save_for_backward(q_TKC, x_NKC, src, dst)
        return _dot(q_TKC, dst, x_NKC, src)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        q_TKC, x_NKC, src, dst = ctx.saved_tensors
        grad_q = _add(torch.zeros_like(q_TKC, memory_format=torch.contiguous_format), dst, x_NKC, src, grad) if ctx.needs_input_grad[0] else None
        grad_x = _add(torch.zeros_like(x_NKC, memory_format=torch.contiguous_format), src, q_TKC, dst, grad) if ctx.needs_input_grad[1] else None
        return grad_q, grad_x, None, None
