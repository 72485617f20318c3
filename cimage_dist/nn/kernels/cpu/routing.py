"""Routing on the CPU, compiled: all iterations of a target run in cache, nothing of size messages x
width is made (§4.4). And what the other layers need there: sums along messages, where torch's
index_add takes several times as long, and dropout.

Targets are independent, so they are shared out among threads. In the backward pass a target repeats
its iterations, walks back through them, and adds to the gradients of its neighbours while
everything is in cache; each thread has a gradient of its own to add to, and these are summed in
order at the end. No two threads write the same number and every sum has one order, so the same
number of threads gives the same bits. A target with very many messages is a hub: its messages are
shared out among the threads in blocks, whose sums are added in order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cimage_dist.nn.kernels.cpu.hub import hub_backward, hub_forward
from cimage_dist.nn.kernels.cpu.loops import (
    add_neighbour_grad,
    add_row,
    copy_row,
    fill,
    normalise,
    normalise_grad,
)
from cimage_dist.nn.kernels.cpu.parallel import (
    LANES,
    keep,
    keep_mask,
    load,
    multiply,
    num_parts,
    pointer,
    run_parts,
    spread,
    store,
)
from cimage_dist.nn.kernels.cpu.passes import (
    GROUP,
    Problem,
    add_messages,
    aligned,
    back_messages,
    messages_of,
    pack,
    turn,
    unpack_grad,
)
from cimage_dist.nn.routing import Routing

HUB_MESSAGES = 4096  # a target with more is a hub
# Of the threads' gradients together; with fewer than threads, fewer threads walk back.
GRADIENT_BYTES = 2 << 30
LARGE_BYTES = 12 << 20  # of rows that messages read in any order: more than caches hold
CACHED_BYTES = 1 << 20  # of rows read at a time there
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_compiled: Any = numba.njit(cache=True, error_model="numpy", nogil=True)


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
    m, indptr, channels, blocks = messages_of(pb), pb.indptr, pb.channels, pb.blocks
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
                    copy_row(centre, 0, m.rows, own, size)
                copy_row(out, 0, m.rows, own, size)
                share = pb.share if t == 0 else 0.0
                add_messages(m, begin, end, centre, 0, share, p, 0, width, False, scaled, out, 0)
            turn(row, 0, out_TKC, v, out_TKC.shape[1], channels, False)
    keep(row)
    keep(scratch)


@_compiled
def _walk_back(
    pb: Any, grad_array: Any, grad_l_array: Any, grad_w_array: Any, parts: int, part: int
) -> None:
    """What the targets of a part that are no hubs add to the gradients of rows and weights: each
    repeats its iterations, then walks back.
    """
    grad, grad_l, grad_w = pointer(grad_array), pointer(grad_l_array), pointer(grad_w_array)
    m, indptr, channels, blocks = messages_of(pb), pb.indptr, pb.channels, pb.blocks
    iterations, through_all = pb.iterations, pb.through_all
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
    grads, centres = pointer(scratch), pointer(scratch[iterations * size :])
    row, rest = pointer(scratch[2 * iterations * size :]), (2 * iterations + 1) * size
    inverse, scaled = pointer(scratch[rest:]), pointer(scratch[rest + iterations * width :])
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
                copy_row(centres, 0, m.rows, own, size)
            copy_row(row, 0, m.rows, own, size)
            add_messages(
                m, begin, end, centres, t * size, share,
                coef, 2 * t * width, stride, True, scaled, row, 0,
            )  # fmt: skip
        copy_row(grads, last * size, grad, v * size, size)
        for t in range(last, skipped - 1, -1):
            has_centre = through_all and (t > 0 or pb.share == 0)
            add_row(grad_l, own, grads, t * size, size)
            fill(row, 0, size, 0.0)
            back_messages(
                m, begin, end, grads, t * size,
                coef, 2 * t * width, stride, grad_w, m.has_weight, has_centre, row, 0,
            )  # fmt: skip
            if has_centre and t > 0:
                normalise_grad(
                    row, 0, centres, t * size, inverse, t * width,
                    grads, (t - 1) * size, channels, blocks,
                )  # fmt: skip
            elif has_centre:
                add_row(grad_l, own, row, 0, size)
        for e in range(begin, end):
            at = (e - begin) * stride + 2 * skipped * width
            add_neighbour_grad(
                grad_l, m.ids[e] * size, coef, at, grads, centres, skipped * size,
                0, blocks * channels, iterations - skipped, first, channels, blocks,
            )  # fmt: skip
    keep(scratch)
    keep(coef_array)


def is_available(dtype: torch.dtype) -> bool:
    return dtype in _TYPES


def _wide(x: Tensor) -> Tensor:
    """Half precision is storage only; the loops compute in single."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _problem(call: Routing, parts: int) -> tuple[Problem, Any]:
    """The call as the loops take it, and the inverse length of every factor of x."""
    _, num_factors, channels = call.x.shape
    rows, inverse = pack(_wide(call.x), call.unit, parts)
    blocks = -(-num_factors // LANES)
    padding = np.zeros(blocks * LANES, rows.dtype)
    padding[num_factors:] = np.finfo(rows.dtype).min / 4
    weight = np.empty(0, rows.dtype)
    if call.weight is not None:
        weight = call.weight.detach().contiguous().numpy().astype(rows.dtype, copy=False)
    return Problem(
        rows=rows,
        first=call.first,
        indptr=call.indptr.contiguous().numpy(),
        indices=call.indices.to(torch.int64).contiguous().numpy(),
        weight=weight,
        padding=padding,
        num_factors=num_factors,
        channels=channels,
        blocks=blocks,
        iterations=call.iterations,
        inv_tau=1.0 / call.temperature,
        hub_messages=HUB_MESSAGES,
        share=0.0 if call.self_init else 1.0 / num_factors,
        through_all=call.through_all,
    ), inverse


def _hubs(pb: Problem) -> list[int]:
    hubs: list[int] = np.flatnonzero(np.diff(pb.indptr) > pb.hub_messages).tolist()
    return hubs


def forward(call: Routing) -> Tensor:
    """The routed sums [T, K, C]."""
    parts = num_parts()
    pb, _ = _problem(call, parts)
    q_TKC = _wide(call.x).new_empty((call.num_targets, *call.x.shape[1:]))
    out = q_TKC.numpy()
    run_parts(lambda part: _forward(pb, out, part, parts), parts)
    for hub in _hubs(pb):
        turn(hub_forward(pb, hub, parts), 0, out, hub, pb.num_factors, pb.channels, False)
    return q_TKC.to(call.x.dtype)


def backward(grad_TKC: Tensor, call: Routing) -> tuple[Tensor, Tensor | None]:
    """Gradients of x [N, K, C] and of the weights [E]; nothing is kept from the forward pass."""
    threads = num_parts()
    pb, inverse = _problem(call, threads)
    grad, _ = pack(_wide(grad_TKC), False, threads)
    grad_w = np.zeros_like(pb.weight)
    grad_x = torch.empty_like(_wide(call.x), memory_format=torch.contiguous_format)
    # As many gradients to add to as there are threads, unless they would take too much room.
    parts = max(1, min(threads, GRADIENT_BYTES // max(pb.rows.nbytes, 1)))
    grad_l = aligned(parts * pb.rows.size, grad_x).reshape(parts, pb.rows.size)
    run_parts(lambda part: _walk_back(pb, grad, grad_l[part], grad_w, parts, part), parts)
    for hub in _hubs(pb):
        hub_backward(pb, hub, grad, threads, grad_l[0], grad_w)
    out = grad_x.numpy()
    run_parts(lambda part: unpack_grad(grad_l, pb.rows, inverse, out, part, threads), threads)
    weight = call.weight
    to_weight = None if weight is None else torch.from_numpy(grad_w).to(weight.dtype)
    return grad_x.to(call.x.dtype), to_weight


@numba.njit(cache=True, nogil=True)
def group(to: Any, num_targets: int) -> Any:
    """Messages by target: order[indptr[v]:indptr[v+1]] are those into v, in their order (counting
    sort).
    """
    indptr = np.zeros(num_targets + 1, np.int64)
    for v in to:
        indptr[v + 1] += 1
    for v in range(num_targets):
        indptr[v + 1] += indptr[v]
    place, order = indptr[:-1].copy(), np.empty(to.size, np.int64)
    for e in range(to.size):
        order[place[to[e]]] = e
        place[to[e]] += 1
    return indptr, order


@numba.njit(cache=True, nogil=True)
def _sum_rows(
    out_TD: Any,
    indptr: Any,
    order: Any,
    x_ND: Any,
    by: Any,
    weight: Any,
    bounds: Any,
    at_a_time: int,
    part: int,
) -> None:
    """out[v] += Σ_e weight[e]·x[by[e]] over the messages into v, for the targets of a part.

    One pass over the targets for each `at_a_time` rows of x: a target that meets a later row waits
    for its pass, so its messages keep their order.
    """
    first, last = bounds[part], bounds[part + 1]
    place = indptr[first:last].copy()
    for end in range(at_a_time, x_ND.shape[0] + at_a_time, at_a_time):
        for v in range(first, last):
            i = place[v - first]
            while i < indptr[v + 1] and by[order[i]] < end:
                u, w = by[order[i]], weight[order[i]]
                for c in range(x_ND.shape[1]):
                    out_TD[v, c] += w * x_ND[u, c]
                i += 1
            place[v - first] = i


def _rows_at_a_time(x_ND: Tensor, num_messages: int, num_targets: int) -> int:
    """As many rows as stay in a core's cache where x does not and targets have messages for several
    passes, as the columns of sparse features do; else all.
    """
    rows, size = x_ND.shape[0], x_ND.numel() * x_ND.element_size()
    if size < LARGE_BYTES or num_messages < 2 * num_targets * size // CACHED_BYTES:
        return max(rows, 1)
    return max(1, rows * CACHED_BYTES // size)


def sum_messages(
    out_TD: Tensor, by_target: Any, x_ND: Tensor, by: Tensor, weight: Tensor
) -> Tensor:
    """out[to[e]] += weight[e]·x[by[e]] in place, `by_target` = group(to, T).

    Each target adds its messages in their order, so the bits do not depend on the threads.
    """
    indptr, order = by_target
    parts = num_parts()
    # Shares of about equal load: a target costs as much as a message.
    loads = indptr + np.arange(indptr.size)
    bounds = np.searchsorted(loads, loads[-1] * np.arange(parts + 1) // parts)
    bounds[-1] = out_TD.shape[0]
    out, x, weights = out_TD.numpy(), x_ND.contiguous().numpy(), weight.contiguous().numpy()
    at_a_time = _rows_at_a_time(x_ND, order.size, out_TD.shape[0])
    work = partial(_sum_rows, out, indptr, order, x, by.numpy(), weights, bounds, at_a_time)
    run_parts(work, parts)
    return out_TD


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _drop(
    x: Any,
    out: Any,
    first: Any,
    low: Any,
    high: Any,
    threshold: Any,
    scale: float,
    parts: int,
    part: int,
) -> None:
    """out[i] = scale·x[i] where hash(key, first + i) >= threshold, else 0, for a part of all i."""
    source, target, factor = pointer(x), pointer(out), spread(pointer(x), scale)
    vectors = x.size // LANES
    for i in range(vectors * part // parts * LANES, vectors * (part + 1) // parts * LANES, LANES):
        kept = multiply(factor, keep_mask(source, first + np.uint64(i), low, high, threshold))
        store(target, i, multiply(kept, load(source, i)))
    if part == parts - 1 and vectors * LANES < x.size:
        rest = np.zeros(LANES, x.dtype)
        at = first + np.uint64(vectors * LANES)
        kept = keep_mask(source, at, low, high, threshold)
        store(pointer(rest), 0, multiply(factor, kept))
        for i in range(vectors * LANES, x.size):
            out[i] = rest[i - vectors * LANES] * x[i]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _drop_at(
    x: Any, place: Any, out: Any, low: Any, high: Any, threshold: Any, scale: float
) -> None:
    """out[i] = scale·x[i] where hash(key, place[i]) >= threshold, else 0."""
    kept = np.zeros(LANES, x.dtype)
    source, target = pointer(x), pointer(kept)
    for i in range(x.size):
        store(target, 0, keep_mask(source, np.uint64(place[i]), low, high, threshold))
        out[i] = scale * kept[0] * x[i]


def _words(p: float, key: int) -> tuple[np.uint32, np.uint32, np.uint32, float]:
    """The halves of the key, the threshold of the hash, and what kept values are multiplied by."""
    low, high = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32)
    return low, high, np.uint32(min(round(p * 2**32), 2**32 - 1)), 1.0 / (1.0 - p)


def drop_at(x: Tensor, place: Tensor, p: float, key: int) -> Tensor:
    """x·m/(1-p) with m the function of (key, place) that `drop` has at that position."""
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    low, high, threshold, scale = _words(p, key)
    entries = source.numpy()
    factor = entries.dtype.type(scale)
    _drop_at(entries, place.numpy(), out.numpy(), low, high, threshold, factor)
    return out


def drop(x: Tensor, p: float, key: int, first: int = 0) -> Tensor:
    """x·m/(1-p) with m a function of (key, position), positions counted from `first`."""
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    flat, target = source.view(-1).numpy(), out.view(-1).numpy()
    parts = num_parts()
    run_parts(partial(_drop, flat, target, np.uint64(first), *_words(p, key), parts), parts)
    return out
