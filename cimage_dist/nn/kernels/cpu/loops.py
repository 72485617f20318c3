"""The loops of neighbourhood routing for a few messages into one target, compiled (§4.4).
Equations: see `nn/routing.py`.

All arrays come as pointers. Packed rows: K factors are padded to a multiple of LANES and laid out
as [factors / LANES, channels, LANES], so that eight factors are worked on side by side, the softmax
crosses lanes but twice, and a row is read front to back. `*_at` is an offset into one, `stride` the
distance between the values of one message and of the next. C channels, B = padded factors / LANES
blocks; a row has B·C·LANES numbers, the values of a message (one per factor) B·LANES.

Four messages are taken together where there are four: each number of the target's row is then read
once for all of them, and their sums do not wait for one another.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np

from cimage_dist.nn.kernels.cpu.parallel import (
    LANES,
    add,
    divide,
    exp,
    lane_max,
    lane_sum,
    larger,
    length,
    load,
    multiply,
    multiply_add,
    spread,
    store,
    zero_above,
)

EPS = 1e-12
# up to this 1/τ scores of unit vectors, less their bound 1/τ, keep exp in range without looking for
# the largest
_SAFE_SHARPNESS = 20.0

# No reference counting and no Python entry: these are called from compiled code only, with
# pointers.
compiled: Any = cast(Any, numba.njit)(
    cache=True, error_model="numpy", _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@compiled
def row_dots(
    rows: Any,
    ids: Any,
    begin: int,
    end: int,
    other: Any,
    other_at: int,
    out: Any,
    out_at: int,
    stride: int,
    channels: int,
    blocks: int,
) -> None:
    """out[e, k] = <rows[ids[e], k], other[k]> for the messages begin <= e < end."""
    size, span = blocks * channels * LANES, channels * LANES
    zero = spread(out, 0)
    for e in range(begin, end, 4):
        # A short last group repeats its last message.
        e1, e2, e3 = min(e + 1, end - 1), min(e + 2, end - 1), min(e + 3, end - 1)
        i0, i1, i2, i3 = ids[e] * size, ids[e1] * size, ids[e2] * size, ids[e3] * size
        for block in range(blocks):
            j = other_at + block * span
            a0, a1, a2, a3 = zero, zero, zero, zero
            b0, b1, b2, b3 = zero, zero, zero, zero
            for c in range(0, span - LANES, 2 * LANES):
                q, r = load(other, j + c), load(other, j + c + LANES)
                a0 = multiply_add(load(rows, i0 + c), q, a0)
                b0 = multiply_add(load(rows, i0 + c + LANES), r, b0)
                a1 = multiply_add(load(rows, i1 + c), q, a1)
                b1 = multiply_add(load(rows, i1 + c + LANES), r, b1)
                a2 = multiply_add(load(rows, i2 + c), q, a2)
                b2 = multiply_add(load(rows, i2 + c + LANES), r, b2)
                a3 = multiply_add(load(rows, i3 + c), q, a3)
                b3 = multiply_add(load(rows, i3 + c + LANES), r, b3)
            if channels & 1:
                q = load(other, j + span - LANES)
                a0 = multiply_add(load(rows, i0 + span - LANES), q, a0)
                a1 = multiply_add(load(rows, i1 + span - LANES), q, a1)
                a2 = multiply_add(load(rows, i2 + span - LANES), q, a2)
                a3 = multiply_add(load(rows, i3 + span - LANES), q, a3)
            at = out_at - begin * stride + block * LANES
            store(out, at + e3 * stride, add(a3, b3))
            store(out, at + e2 * stride, add(a2, b2))
            store(out, at + e1 * stride, add(a1, b1))
            store(out, at + e * stride, add(a0, b0))
            i0, i1, i2, i3 = i0 + span, i1 + span, i2 + span, i3 + span


@compiled
def add_rows(
    out: Any,
    out_at: int,
    rows: Any,
    ids: Any,
    begin: int,
    end: int,
    scale: Any,
    scale_at: int,
    stride: int,
    channels: int,
    blocks: int,
) -> None:
    """out[k] += Σ_e scale[e, k]·rows[ids[e], k] over the messages begin <= e < end, in their
    order.
    """
    size, span = blocks * channels * LANES, channels * LANES
    zero = spread(out, 0)
    for e in range(begin, end, 4):
        # A short last group repeats its last message with scale zero.
        rest = end - e
        e1, e2, e3 = min(e + 1, end - 1), min(e + 2, end - 1), min(e + 3, end - 1)
        i0, i1, i2, i3 = ids[e] * size, ids[e1] * size, ids[e2] * size, ids[e3] * size
        for block in range(blocks):
            at = scale_at + (e - begin) * stride + block * LANES
            s0, s1, s2, s3 = load(scale, at), zero, zero, zero
            if rest > 1:
                s1 = load(scale, at + stride)
            if rest > 2:
                s2 = load(scale, at + 2 * stride)
            if rest > 3:
                s3 = load(scale, at + 3 * stride)
            for c in range(block * span, (block + 1) * span, LANES):
                one = multiply_add(s0, load(rows, i0 + c), load(out, out_at + c))
                one = multiply_add(s1, load(rows, i1 + c), one)
                one = multiply_add(s2, load(rows, i2 + c), one)
                store(out, out_at + c, multiply_add(s3, load(rows, i3 + c), one))


@compiled
def softmax_rows(
    p: Any, p_at: int, stride: int, count: int, inv_tau: float, padding: Any, blocks: int
) -> None:
    """p[e, :] = softmax over k of p[e, k] / τ, in place; `padding` is 0, or hugely negative in the
    lanes that hold no factor.
    """
    sharpness, zero, one = spread(p, inv_tau), spread(p, 0), spread(p, 1)
    for at in range(p_at, p_at + count * stride, stride):
        shift = spread(p, -inv_tau)
        if inv_tau > _SAFE_SHARPNESS:
            top = spread(p, -np.inf)
            for block in range(0, blocks * LANES, LANES):
                score = multiply_add(load(p, at + block), sharpness, load(padding, block))
                top = larger(top, score)
            shift = spread(p, -lane_max(top))
        total = zero
        for block in range(0, blocks * LANES, LANES):
            e = exp(add(multiply_add(load(p, at + block), sharpness, load(padding, block)), shift))
            store(p, at + block, e)
            total = add(total, e)
        scale = divide(one, spread(p, lane_sum(total)))
        for block in range(0, blocks * LANES, LANES):
            store(p, at + block, multiply(scale, load(p, at + block)))


@compiled
def scale_values(p: Any, p_at: int, out: Any, out_at: int, factor: float, blocks: int) -> None:
    """out[k] = factor·p[k] for one message."""
    f = spread(p, factor)
    for block in range(0, blocks * LANES, LANES):
        store(out, out_at + block, multiply(f, load(p, p_at + block)))


@compiled
def score_grad(coef: Any, at: int, weight: float, inv_tau: float, blocks: int) -> float:
    """From p at the place of α and d = <g, rows[u]> at that of β, to α = w·p and β = w·p·(d - Σ
    p·d)/τ; returns Σ p·d.
    """
    beta = at + blocks * LANES
    total = spread(coef, 0)
    for block in range(0, blocks * LANES, LANES):
        total = multiply_add(load(coef, at + block), load(coef, beta + block), total)
    mean = lane_sum(total)
    w, minus_mean, sharpness = spread(coef, weight), spread(coef, -mean), spread(coef, inv_tau)
    for block in range(0, blocks * LANES, LANES):
        alpha = multiply(w, load(coef, at + block))
        store(coef, at + block, alpha)
        apart = add(load(coef, beta + block), minus_mean)
        store(coef, beta + block, multiply(multiply(alpha, sharpness), apart))
    return mean


@compiled
def copy_row(out: Any, out_at: int, row: Any, row_at: int, size: int) -> None:
    for c in range(0, size, LANES):
        store(out, out_at + c, load(row, row_at + c))


@compiled
def add_row(out: Any, out_at: int, row: Any, row_at: int, size: int) -> None:
    for c in range(0, size, LANES):
        store(out, out_at + c, add(load(out, out_at + c), load(row, row_at + c)))


@compiled
def fill(out: Any, out_at: int, size: int, value: float) -> None:
    for c in range(0, size, LANES):
        store(out, out_at + c, spread(out, value))


@compiled
def _dot(a: Any, a_at: int, b: Any, b_at: int, channels: int) -> Any:
    """Σ_c a[c]·b[c] of one block, lane by lane; four sums in flight, as one would wait for its own
    last addition.
    """
    s0 = s1 = s2 = s3 = spread(a, 0)
    whole = channels // 4 * 4 * LANES
    for c in range(0, whole, 4 * LANES):
        s0 = multiply_add(load(a, a_at + c), load(b, b_at + c), s0)
        s1 = multiply_add(load(a, a_at + c + LANES), load(b, b_at + c + LANES), s1)
        s2 = multiply_add(load(a, a_at + c + 2 * LANES), load(b, b_at + c + 2 * LANES), s2)
        s3 = multiply_add(load(a, a_at + c + 3 * LANES), load(b, b_at + c + 3 * LANES), s3)
    for c in range(whole, channels * LANES, LANES):
        s0 = multiply_add(load(a, a_at + c), load(b, b_at + c), s0)
    return add(add(s0, s1), add(s2, s3))


@compiled
def normalise(
    row: Any,
    row_at: int,
    out: Any,
    out_at: int,
    inverse: Any,
    inverse_at: int,
    channels: int,
    blocks: int,
) -> None:
    """out[k] = row[k] / max(‖row[k]‖, ε), and the factor by which it was multiplied."""
    for block in range(blocks):
        begin = block * channels * LANES
        end = begin + channels * LANES
        square = _dot(row, row_at + begin, row, row_at + begin, channels)
        scale = divide(spread(row, 1), length(square, EPS))
        store(inverse, inverse_at + block * LANES, scale)
        for c in range(begin, end, LANES):
            store(out, out_at + c, multiply(scale, load(row, row_at + c)))


@compiled
def make_unit(
    row: Any, row_at: int, inverse: Any, inverse_at: int, channels: int, blocks: int
) -> None:
    """The same in place, by division: a factor of one channel becomes exactly 1 or -1, and sums of
    such cancel to exactly 0, as they do in plain tensor operations.
    """
    for block in range(blocks):
        begin = row_at + block * channels * LANES
        norm = length(_dot(row, begin, row, begin, channels), EPS)
        store(inverse, inverse_at + block * LANES, divide(spread(row, 1), norm))
        for c in range(begin, begin + channels * LANES, LANES):
            store(row, c, divide(load(row, c), norm))


@compiled
def normalise_grad(
    grad: Any,
    grad_at: int,
    unit: Any,
    unit_at: int,
    inverse: Any,
    inverse_at: int,
    out: Any,
    out_at: int,
    channels: int,
    blocks: int,
) -> None:
    """out[k] = (g - u<u,g>) / ‖a‖ for u = a / ‖a‖; below ε the length was a constant, and the
    projection falls away.
    """
    ceiling = divide(spread(grad, 1), length(spread(grad, 0), EPS))
    for block in range(blocks):
        begin = block * channels * LANES
        end = begin + channels * LANES
        along = _dot(grad, grad_at + begin, unit, unit_at + begin, channels)
        scale = load(inverse, inverse_at + block * LANES)
        along = multiply(spread(grad, -1), zero_above(along, scale, ceiling))
        for c in range(begin, end, LANES):
            left = multiply_add(along, load(unit, unit_at + c), load(grad, grad_at + c))
            store(out, out_at + c, multiply(scale, left))


@compiled
def add_neighbour_grad(
    out: Any,
    out_at: int,
    coef: Any,
    coef_at: int,
    grads: Any,
    centres: Any,
    stack_at: int,
    begin: int,
    end: int,
    steps: int,
    first: int,
    channels: int,
    blocks: int,
) -> None:
    """out[k] += Σ_t α_t[k]·g_t[k] + Σ_{t >= first} β_t[k]·q_t[k] for the part begin <= block·C +
    channel < end of one neighbour's row.

    The coefficients of a message are [steps, 2, B·LANES]: α_t = w·p_t, by which the gradient g_t of
    the target's t-th sum reaches the neighbour, and β_t, the gradient of the score, by which the
    centre q_t does.
    """
    size, width = blocks * channels * LANES, blocks * LANES
    for block in range(begin // channels, (end - 1) // channels + 1):
        low, high = max(begin - block * channels, 0), min(end - block * channels, channels)
        whole = low + (high - low) // 4 * 4
        for c in range(low, whole, 4):
            at = (block * channels + c) * LANES
            # Four vectors of the row at once: the coefficients are read once for all of them.
            a0, a1 = load(out, out_at + at), load(out, out_at + at + LANES)
            a2, a3 = load(out, out_at + at + 2 * LANES), load(out, out_at + at + 3 * LANES)
            for t in range(steps):
                i = stack_at + t * size + at
                alpha = load(coef, coef_at + 2 * t * width + block * LANES)
                a0 = multiply_add(alpha, load(grads, i), a0)
                a1 = multiply_add(alpha, load(grads, i + LANES), a1)
                a2 = multiply_add(alpha, load(grads, i + 2 * LANES), a2)
                a3 = multiply_add(alpha, load(grads, i + 3 * LANES), a3)
            for t in range(first, steps):
                i = stack_at + t * size + at
                beta = load(coef, coef_at + (2 * t + 1) * width + block * LANES)
                a0 = multiply_add(beta, load(centres, i), a0)
                a1 = multiply_add(beta, load(centres, i + LANES), a1)
                a2 = multiply_add(beta, load(centres, i + 2 * LANES), a2)
                a3 = multiply_add(beta, load(centres, i + 3 * LANES), a3)
            store(out, out_at + at, a0)
            store(out, out_at + at + LANES, a1)
            store(out, out_at + at + 2 * LANES, a2)
            store(out, out_at + at + 3 * LANES, a3)
        from_, to = (block * channels + whole) * LANES, (block * channels + high) * LANES
        for j in range(from_, to, LANES):
            one = load(out, out_at + j)
            for t in range(steps):
                alpha = load(coef, coef_at + 2 * t * width + block * LANES)
                one = multiply_add(alpha, load(grads, stack_at + t * size + j), one)
            for t in range(first, steps):
                beta = load(coef, coef_at + (2 * t + 1) * width + block * LANES)
                one = multiply_add(beta, load(centres, stack_at + t * size + j), one)
            store(out, out_at + j, one)
