"""Routing into one target of very many neighbours, compiled: its messages in blocks among the
threads, sums of blocks added in order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np

from cimage_dist.nn.kernels.cpu.loops import add_neighbour_grad, fill, normalise, normalise_grad
from cimage_dist.nn.kernels.cpu.parallel import LANES, keep, pointer, run_parts
from cimage_dist.nn.kernels.cpu.passes import (
    GROUP,
    Problem,
    add_messages,
    assign,
    back_messages,
    messages_of,
)

# messages per block: fixed, so that sums have the same order whatever the number of threads
BLOCK = 512

_compiled: Any = numba.njit(cache=True, error_model="numpy", nogil=True)


@_compiled
def _sum_blocks(
    pb: Any, v: int, t: int, centres_array: Any, partial_array: Any, parts: int, part: int
) -> None:
    """Σ w·p_t·l[u] over each block of a part, the centre of iteration t being the t-th row of the
    centres.
    """
    m, channels, blocks = messages_of(pb), pb.channels, pb.blocks
    centres, sums = pointer(centres_array), pointer(partial_array)
    size, width, share = blocks * channels * LANES, blocks * LANES, pb.share if t == 0 else 0.0
    scratch = np.empty(2 * GROUP * width, pb.rows.dtype)
    p, scaled = pointer(scratch), pointer(scratch[GROUP * width :])
    count = partial_array.size // size
    for block in range(count * part // parts, count * (part + 1) // parts):
        low = pb.indptr[v] + block * BLOCK
        high = min(pb.indptr[v + 1], low + BLOCK)
        fill(sums, block * size, size, 0.0)
        add_messages(
            m, low, high, centres, t * size, share, p, 0, width, False, scaled, sums, block * size
        )
    keep(scratch)


@_compiled
def _coefficients(
    pb: Any,
    t: int,
    low: int,
    high: int,
    grads_array: Any,
    centres_array: Any,
    coef_array: Any,
    at: int,
    stride: int,
    grad_w_array: Any,
    out_array: Any,
    out_at: int,
) -> None:
    """α and β of the messages low .. high at iteration t; adds to the weights' gradients, and Σ
    β·l[u] to the output, unless these arrays are empty.
    """
    grads, centres, coef = pointer(grads_array), pointer(centres_array), pointer(coef_array)
    grad_w, out = pointer(grad_w_array), pointer(out_array)
    m, size, share = messages_of(pb), pb.blocks * pb.channels * LANES, pb.share if t == 0 else 0.0
    assign(m, low, high, centres, t * size, share, coef, at, stride)
    back_messages(
        m, low, high, grads, t * size,
        coef, at, stride, grad_w, grad_w_array.size > 0, out_array.size > 0, out, out_at,
    )  # fmt: skip


@_compiled
def _centre_grad_blocks(
    pb: Any, v: int, t: int, grads: Any, centres: Any, sums: Any, parts: int, part: int
) -> None:
    """Σ β_t·l[u] over each block of a part; the weights get their gradient where the neighbours
    do.
    """
    width, begin, end = pb.blocks * LANES, pb.indptr[v], pb.indptr[v + 1]
    size = width * pb.channels
    coef, nothing = np.empty(2 * BLOCK * width, pb.rows.dtype), np.empty(0, pb.rows.dtype)
    count = sums.size // size
    for block in range(count * part // parts, count * (part + 1) // parts):
        fill(pointer(sums), block * size, size, 0.0)
        low, high = begin + block * BLOCK, min(end, begin + (block + 1) * BLOCK)
        _coefficients(
            pb, t, low, high, grads, centres, coef, 0, 2 * width, nothing, sums, block * size
        )


@_compiled
def _all_coefficients(
    pb: Any,
    begin: int,
    end: int,
    skipped: int,
    grads: Any,
    centres: Any,
    coef: Any,
    grad_w: Any,
    parts: int,
    part: int,
) -> None:
    """Coefficients of a part of the messages begin .. end at every iteration from `skipped` on."""
    width = pb.blocks * LANES
    stride = 2 * (pb.iterations - skipped) * width
    low, high = begin + (end - begin) * part // parts, begin + (end - begin) * (part + 1) // parts
    nothing = np.empty(0, pb.rows.dtype)
    for t in range(skipped, pb.iterations):
        at = (low - begin) * stride + 2 * (t - skipped) * width
        _coefficients(pb, t, low, high, grads, centres, coef, at, stride, grad_w, nothing, 0)


@_compiled
def _scatter(
    pb: Any,
    begin: int,
    end: int,
    skipped: int,
    first: int,
    grads_array: Any,
    centres_array: Any,
    coef_array: Any,
    grad_l_array: Any,
    slices: int,
    part: int,
) -> None:
    """Add the messages begin .. end, one after another, to a slice of their neighbours'
    gradients.
    """
    grads, centres, coef = pointer(grads_array), pointer(centres_array), pointer(coef_array)
    grad_l = pointer(grad_l_array)
    ids, channels, blocks, steps = pb.indices, pb.channels, pb.blocks, pb.iterations - skipped
    size, stride = blocks * channels * LANES, 2 * steps * blocks * LANES
    low, high = blocks * channels * part // slices, blocks * channels * (part + 1) // slices
    for e in range(begin, end):
        add_neighbour_grad(
            grad_l, ids[e] * size, coef, (e - begin) * stride, grads, centres, skipped * size,
            low, high, steps, first, channels, blocks,
        )  # fmt: skip


@_compiled
def _normalised(row: Any, out: Any, t: int, inverse: Any, channels: int, blocks: int) -> None:
    at, width = t * blocks * channels * LANES, t * blocks * LANES
    normalise(pointer(row), 0, pointer(out), at, pointer(inverse), width, channels, blocks)


@_compiled
def _normalised_grad(
    row: Any, centres: Any, inverse: Any, t: int, grads: Any, channels: int, blocks: int
) -> None:
    size = blocks * channels * LANES
    normalise_grad(
        pointer(row), 0, pointer(centres), t * size, pointer(inverse), t * blocks * LANES,
        pointer(grads), (t - 1) * size, channels, blocks,
    )  # fmt: skip


class _Hub:
    """One hub's iterations: the centres q_t, their inverse lengths, and the sums of its blocks of
    messages.
    """

    def __init__(self, pb: Problem, v: int, parts: int) -> None:
        self.pb, self.v, self.parts = pb, v, parts
        self.size = pb.blocks * pb.channels * LANES
        dtype, count = pb.rows.dtype, -(-int(pb.indptr[v + 1] - pb.indptr[v]) // BLOCK)
        self.own = pb.rows[(pb.first + v) * self.size : (pb.first + v + 1) * self.size]
        self.centres = np.zeros(pb.iterations * self.size, dtype)
        self.inverse = np.empty(pb.iterations * pb.blocks * LANES, dtype)
        self.sums = np.empty(count * self.size, dtype)

    def _total(self) -> Any:
        """The blocks' sums, added one after another."""
        return np.add.accumulate(self.sums.reshape(-1, self.size), axis=0)[-1]

    def repeat(self) -> Any:
        """All iterations; returns the last sum."""
        pb = self.pb
        self.centres[: self.size] = self.own
        for t in range(pb.iterations):
            work = partial(_sum_blocks, pb, self.v, t, self.centres, self.sums, self.parts)
            run_parts(work, self.parts)
            row = self.own + self._total()
            if t + 1 < pb.iterations:
                _normalised(row, self.centres, t + 1, self.inverse, pb.channels, pb.blocks)
        return row

    def walk_back(self, grads: Any, own_grad: Any) -> None:
        """g_t of every iteration from the last one's; adds to the gradient of the hub's own row."""
        pb = self.pb
        for t in range(pb.iterations - 1, -1, -1):
            own_grad += grads[t * self.size : (t + 1) * self.size]
            if t > 0 or pb.share == 0:
                stacks = (grads, self.centres, self.sums)
                work = partial(_centre_grad_blocks, pb, self.v, t, *stacks, self.parts)
                run_parts(work, self.parts)
                if t > 0:
                    unit, shape = (self.centres, self.inverse), (pb.channels, pb.blocks)
                    _normalised_grad(self._total(), *unit, t, grads, *shape)
                else:
                    own_grad += self._total()


def hub_forward(pb: Problem, v: int, parts: int) -> Any:
    """The last sum of a hub, packed."""
    return _Hub(pb, v, parts).repeat()


def hub_backward(pb: Problem, v: int, grad: Any, parts: int, grad_l: Any, grad_w: Any) -> None:
    """Add the hub's contributions to grad_l and grad_w, as many messages at a time as make a target
    a hub.
    """
    through_all, at_once = pb.through_all, pb.hub_messages
    hub = _Hub(pb, v, parts)
    hub.repeat()
    size, last = hub.size, pb.iterations - 1
    grads = np.zeros(pb.iterations * size, pb.rows.dtype)
    grads[last * size :] = grad[v * size : (v + 1) * size]
    own_grad = grad_l[(pb.first + v) * size : (pb.first + v + 1) * size]
    if through_all:
        hub.walk_back(grads, own_grad)
    else:
        own_grad += grads[last * size :]
    skipped, first = 0 if through_all else last, 1 if pb.share > 0 or not through_all else 0
    begin, end = int(pb.indptr[v]), int(pb.indptr[v + 1])
    steps = pb.iterations - skipped
    coef = np.empty(2 * min(at_once, end - begin) * steps * pb.blocks * LANES, pb.rows.dtype)
    slices = min(parts, pb.blocks * pb.channels)
    for low in range(begin, end, at_once):
        high = min(low + at_once, end)
        where, stacks = (pb, low, high, skipped), (grads, hub.centres, coef)
        run_parts(partial(_all_coefficients, *where, *stacks, grad_w, parts), parts)
        run_parts(partial(_scatter, *where, first, *stacks, grad_l, slices), slices)
