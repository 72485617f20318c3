"""Routing on the CPU, compiled: all iterations of a target run in cache, nothing of size messages x
width is made (§4.4).

Targets are independent, so they are shared out among threads. In the backward pass a target repeats
its iterations, walks back through them, and adds to the gradients of its neighbours while
everything is in cache; each thread has a gradient of its own to add to, and these are summed in
order at the end. No two threads write the same number and every sum has one order, so the same
number of threads gives the same bits. A target with very many messages is a hub: its messages are
shared out among the threads in blocks, whose sums are added in order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from cimage_dist.nn.kernels.cpu.hub import hub_backward, hub_forward
from cimage_dist.nn.kernels.cpu.layout import aligned, pack, turn, unpack_grad
from cimage_dist.nn.kernels.cpu.loops import (
    add_neighbour_grad,
    add_row,
    copy_row,
    fill,
    normalise,
    normalise_grad,
)
from cimage_dist.nn.kernels.cpu.passes import GROUP, add_messages, back_messages
from cimage_dist.nn.kernels.cpu.simd import LANES, keep, pointer
from cimage_dist.nn.kernels.cpu.threads import num_parts, run_parts

HUB_MESSAGES = 4096  # a target with more is a hub
GRADIENT_BYTES = (
    2 << 30
)  # of the threads' gradients together; with fewer than threads, fewer threads walk back
_compiled: Any = numba.njit(cache=True, error_model="numpy", nogil=True)


class _Problem(NamedTuple):
    """What every loop needs to know. Flat packed `rows`; target v is row first + v."""

    rows: Any
    first: int
    indptr: Any
    indices: Any
    weight: Any
    padding: Any
    num_factors: int
    channels: int
    blocks: int
    iterations: int
    inv_tau: float
    hub_messages: int
    # of every factor in the first iteration; 0: it too is assigned, by the target's own row
    share: float


@_compiled
def _begin(indptr: Any, part: int, parts: int) -> int:
    """The first target of a part, such that parts carry about the same load; a target costs about
    as much as four messages.
    """
    num_targets = indptr.size - 1
    left, right = 0, num_targets
    bound = indptr[0] + (indptr[num_targets] - indptr[0] + 4 * num_targets) * part // parts
    while left < right:
        middle = (left + right) // 2
        if indptr[middle] + 4 * middle < bound:
            left = middle + 1
        else:
            right = middle
    return left


@_compiled
def _forward(pb: Any, out_TKC: Any, part: int, parts: int) -> None:
    """The last sum of every target of a part that is no hub."""
    rows, ids, weight, padding = (
        pointer(pb.rows),
        pointer(pb.indices),
        pointer(pb.weight),
        pointer(pb.padding),
    )
    indptr, channels, blocks, has_weight = pb.indptr, pb.channels, pb.blocks, pb.weight.size > 0
    size, width = blocks * channels * LANES, blocks * LANES
    row = np.empty(size, pb.rows.dtype)
    scratch = np.empty(size + (1 + 2 * GROUP) * width, pb.rows.dtype)
    out, centre, inverse = pointer(row), pointer(scratch), pointer(scratch[size:])
    p, scaled = pointer(scratch[size + width :]), pointer(scratch[size + (1 + GROUP) * width :])
    low, high = _begin(indptr, part, parts), _begin(indptr, part + 1, parts)
    for v in range(low, high):
        begin, end, own = indptr[v], indptr[v + 1], (pb.first + v) * size
        if end - begin <= pb.hub_messages:
            for t in range(pb.iterations):
                if t > 0:
                    normalise(out, 0, centre, 0, inverse, 0, channels, blocks)
                elif pb.share == 0:
                    copy_row(centre, 0, rows, own, size)
                copy_row(out, 0, rows, own, size)
                share = pb.share if t == 0 else 0.0
                add_messages(
                    rows,
                    ids,
                    weight,
                    has_weight,
                    begin,
                    end,
                    centre,
                    0,
                    share,
                    pb.inv_tau,
                    padding,
                    p,
                    0,
                    width,
                    False,
                    scaled,
                    out,
                    0,
                    channels,
                    blocks,
                )
            turn(row, 0, out_TKC, v, out_TKC.shape[1], channels, False)
    keep(row)
    keep(scratch)


@_compiled
def _walk_back(
    pb: Any,
    through_all: bool,
    grad_array: Any,
    grad_l_array: Any,
    grad_w_array: Any,
    parts: int,
    part: int,
) -> None:
    """What the targets of a part that are no hubs add to the gradients of rows and weights: each
    repeats its iterations, then walks back.
    """
    rows, ids, weight, padding = (
        pointer(pb.rows),
        pointer(pb.indices),
        pointer(pb.weight),
        pointer(pb.padding),
    )
    grad, grad_l, grad_w = pointer(grad_array), pointer(grad_l_array), pointer(grad_w_array)
    indptr, channels, blocks, iterations, has_weight = (
        pb.indptr,
        pb.channels,
        pb.blocks,
        pb.iterations,
        pb.weight.size > 0,
    )
    size, width = blocks * channels * LANES, blocks * LANES
    stride, last = 2 * iterations * width, iterations - 1
    skipped = 0 if through_all else last  # iterations that carry no gradient
    first = 1 if pb.share > 0 or not through_all else 0
    fill(grad_l, 0, grad_l_array.size, 0.0)
    low, high = _begin(indptr, part, parts), _begin(indptr, part + 1, parts)
    most = 0
    for v in range(low, high):
        degree = indptr[v + 1] - indptr[v]
        if degree <= pb.hub_messages:
            most = max(most, degree)
    scratch = np.empty((2 * iterations + 1) * size + (iterations + GROUP) * width, pb.rows.dtype)
    coef_array = np.empty(most * stride, pb.rows.dtype)
    grads, centres, row = (
        pointer(scratch),
        pointer(scratch[iterations * size :]),
        pointer(scratch[2 * iterations * size :]),
    )
    inverse, scaled = (
        pointer(scratch[(2 * iterations + 1) * size :]),
        pointer(scratch[(2 * iterations + 1) * size + iterations * width :]),
    )
    coef = pointer(coef_array)
    for v in range(low, high):
        begin, end, own = indptr[v], indptr[v + 1], (pb.first + v) * size
        if end - begin > pb.hub_messages:
            continue
        for t in range(iterations):
            share = pb.share if t == 0 else 0.0
            if t > 0:
                normalise(row, 0, centres, t * size, inverse, t * width, channels, blocks)
            elif pb.share == 0:
                copy_row(centres, 0, rows, own, size)
            copy_row(row, 0, rows, own, size)
            add_messages(
                rows, ids, weight, has_weight, begin, end, centres, t * size, share, pb.inv_tau, padding,
                coef, 2 * t * width, stride, True, scaled, row, 0, channels, blocks,
            )  # fmt: skip
        copy_row(grads, last * size, grad, v * size, size)
        for t in range(last, skipped - 1, -1):
            has_centre = through_all and (t > 0 or pb.share == 0)
            add_row(grad_l, own, grads, t * size, size)
            fill(row, 0, size, 0.0)
            back_messages(
                rows, ids, weight, has_weight, begin, end, grads, t * size, pb.inv_tau,
                coef, 2 * t * width, stride, grad_w, has_weight, has_centre, row, 0, channels, blocks,
            )  # fmt: skip
            if has_centre and t > 0:
                normalise_grad(
                    row,
                    0,
                    centres,
                    t * size,
                    inverse,
                    t * width,
                    grads,
                    (t - 1) * size,
                    channels,
                    blocks,
                )
            elif has_centre:
                add_row(grad_l, own, row, 0, size)
        for e in range(begin, end):
            at = (e - begin) * stride + 2 * skipped * width
            add_neighbour_grad(
                grad_l,
                ids[e] * size,
                coef,
                at,
                grads,
                centres,
                skipped * size,
                0,
                blocks * channels,
                iterations - skipped,
                first,
                channels,
                blocks,
            )
    keep(scratch)
    keep(coef_array)


def _problem(
    rows: Any,
    shape: torch.Size,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    iterations: int,
    temperature: float,
    self_init: bool,
) -> _Problem:
    blocks = -(-shape[1] // LANES)
    padding = np.zeros(blocks * LANES, rows.dtype)
    padding[shape[1] :] = np.finfo(rows.dtype).min / 4
    factors = (
        np.empty(0, rows.dtype)
        if weight is None
        else weight.detach().contiguous().numpy().astype(rows.dtype, copy=False)
    )
    ids = indices.to(torch.int64).contiguous().numpy()
    return _Problem(
        rows,
        first,
        indptr.contiguous().numpy(),
        ids,
        factors,
        padding,
        shape[1],
        shape[2],
        blocks,
        iterations,
        1.0 / temperature,
        HUB_MESSAGES,
        0.0 if self_init else 1.0 / shape[1],
    )


def forward(
    x_NKC: Tensor,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    iterations: int,
    temperature: float,
    self_init: bool,
    unit: bool = True,
) -> Tensor:
    """The routed sums [T, K, C]; `unit` normalises the rows of x first, otherwise they are taken to
    be normalised.
    """
    parts = num_parts()
    rows, _ = pack(x_NKC, unit, parts)
    pb = _problem(
        rows, x_NKC.shape, first, indptr, indices, weight, iterations, temperature, self_init
    )
    q_TKC = x_NKC.new_empty((indptr.numel() - 1, *x_NKC.shape[1:]))
    out = q_TKC.numpy()
    run_parts(lambda part: _forward(pb, out, part, parts), parts)
    for hub in np.flatnonzero(np.diff(pb.indptr) > HUB_MESSAGES):
        turn(hub_forward(pb, int(hub), parts), 0, out, hub, pb.num_factors, pb.channels, False)
    return q_TKC


def backward(
    grad_TKC: Tensor,
    x_NKC: Tensor,
    first: int,
    indptr: Tensor,
    indices: Tensor,
    weight: Tensor | None,
    iterations: int,
    temperature: float,
    self_init: bool,
    through_all: bool,
    unit: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x [N, K, C] and of the weights [E]; nothing is kept from the forward pass."""
    threads = num_parts()
    rows, inverse = pack(x_NKC, unit, threads)
    pb = _problem(
        rows, x_NKC.shape, first, indptr, indices, weight, iterations, temperature, self_init
    )
    grad, _ = pack(grad_TKC, False, threads)
    grad_w = np.zeros_like(pb.weight)
    # As many gradients to add to as there are threads, unless they would take too much room.
    parts = max(1, min(threads, GRADIENT_BYTES // max(rows.nbytes, 1)))
    grad_l = aligned(parts * rows.size, x_NKC).reshape(parts, rows.size)
    run_parts(
        lambda part: _walk_back(pb, through_all, grad, grad_l[part], grad_w, parts, part), parts
    )
    for hub in np.flatnonzero(np.diff(pb.indptr) > HUB_MESSAGES):
        hub_backward(pb, int(hub), grad, through_all, threads, HUB_MESSAGES, grad_l[0], grad_w)
    grad_x = torch.empty_like(x_NKC, memory_format=torch.contiguous_format)
    out = grad_x.numpy()
    run_parts(lambda part: unpack_grad(grad_l, rows, inverse, out, part, threads), threads)
    return grad_x, None if weight is None else torch.from_numpy(grad_w).to(weight.dtype)
