"""One iteration of routing over the messages into a target, forwards and backwards, compiled; and
the packed layout of its rows (see `loops.py` for what it is good for), to and fro.

`coef` holds 2·B·LANES numbers per message and iteration, α then β, at
`at + (e - begin)·stride`; forwards p is left at the place of α.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
from torch import Tensor

from cimage_dist.nn.kernels.cpu.loops import (
    add_row,
    add_rows,
    compiled,
    fill,
    make_unit,
    normalise_grad,
    row_dots,
    scale_values,
    score_grad,
    softmax_rows,
)
from cimage_dist.nn.kernels.cpu.parallel import LANES, load, pointer, run_parts, store, transpose

_called: Any = numba.njit(cache=True, error_model="numpy", nogil=True)
# messages at a time: their rows stay in the first-level cache between the two readings, their
# softmaxes overlap
GROUP = 8


class Problem(NamedTuple):
    """What every loop needs to know, as arrays. Flat packed `rows`; target v is row first + v.

    `padding`: as in `softmax_rows`; `weight` is empty where all weigh 1. `share`: p of every factor
    in the first iteration; 0: it too is assigned, by the target's own row.
    `through_all`: gradients go through all iterations.
    """

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
    share: float
    through_all: bool


class Messages(NamedTuple):
    """What the passes below read, as pointers into a `Problem`, which must outlive them."""

    rows: Any
    ids: Any
    weight: Any
    has_weight: bool
    padding: Any
    inv_tau: float
    channels: int
    blocks: int


@_called
def messages_of(pb: Any) -> Any:
    return Messages(
        pointer(pb.rows),
        pointer(pb.indices),
        pointer(pb.weight),
        pb.weight.size > 0,
        pointer(pb.padding),
        pb.inv_tau,
        pb.channels,
        pb.blocks,
    )


@compiled
def assign(
    m: Messages,
    begin: int,
    end: int,
    centre: Any,
    centre_at: int,
    share: float,
    p: Any,
    p_at: int,
    stride: int,
) -> None:
    """p[e, k] = softmax over k of <rows[u, k], centre[k]> / τ; with share > 0, that constant."""
    if share > 0:
        for e in range(end - begin):
            fill(p, p_at + e * stride, m.blocks * LANES, share)
    else:
        row_dots(
            m.rows, m.ids, begin, end, centre, centre_at, p, p_at, stride, m.channels, m.blocks
        )
        softmax_rows(p, p_at, stride, end - begin, m.inv_tau, m.padding, m.blocks)


@compiled
def add_messages(
    m: Messages,
    begin: int,
    end: int,
    centre: Any,
    centre_at: int,
    share: float,
    p: Any,
    p_at: int,
    stride: int,
    keep: bool,
    scaled: Any,
    out: Any,
    out_at: int,
) -> None:
    """out += Σ_e w·p·rows[u] with p from `assign`. `keep` leaves each message's p in its place,
    otherwise GROUP places are used over and over; `scaled` has room for GROUP messages.
    """
    width, channels, blocks = m.blocks * LANES, m.channels, m.blocks
    for low in range(begin, end, GROUP):
        high = min(low + GROUP, end)
        at = p_at + (low - begin) * stride if keep else p_at
        assign(m, low, high, centre, centre_at, share, p, at, stride)
        if m.has_weight:
            for e in range(high - low):
                scale_values(p, at + e * stride, scaled, e * width, m.weight[low + e], blocks)
            add_rows(out, out_at, m.rows, m.ids, low, high, scaled, 0, width, channels, blocks)
        else:
            add_rows(out, out_at, m.rows, m.ids, low, high, p, at, stride, channels, blocks)


@compiled
def back_messages(
    m: Messages,
    begin: int,
    end: int,
    grad: Any,
    grad_at: int,
    coef: Any,
    at: int,
    stride: int,
    grad_w: Any,
    wants_grad_w: bool,
    has_centre: bool,
    out: Any,
    out_at: int,
) -> None:
    """Turn p into α and β for every message given g, the gradient of the sum; add to the weights'
    gradients if wanted; with `has_centre` out += Σ β·rows[u], the gradient of the centre.
    """
    rows, ids, channels, blocks = m.rows, m.ids, m.channels, m.blocks
    width = blocks * LANES
    for low in range(begin, end, GROUP):
        high = min(low + GROUP, end)
        place = at + (low - begin) * stride
        row_dots(rows, ids, low, high, grad, grad_at, coef, place + width, stride, channels, blocks)
        for e in range(low, high):
            w = m.weight[e] if m.has_weight else 1.0
            slope = score_grad(coef, place + (e - low) * stride, w, m.inv_tau, blocks)
            if wants_grad_w:
                grad_w[e] += slope
        if has_centre:
            add_rows(
                out, out_at, rows, ids, low, high, coef, place + width, stride, channels, blocks
            )


@_called
def turn(
    source_array: Any,
    source_row: int,
    target_array: Any,
    target_row: int,
    num_factors: int,
    channels: int,
    packs: bool,
) -> None:
    """One row from [K, C] to [K / LANES, C, LANES] (`packs`), or back."""
    source, target = pointer(source_array), pointer(target_array)
    blocks = -(-num_factors // LANES)
    plain_row, packed_row = (source_row, target_row) if packs else (target_row, source_row)
    plain, packed = plain_row * num_factors * channels, packed_row * blocks * channels * LANES
    whole = channels // LANES * LANES
    for block in range(num_factors // LANES):
        a, b = plain + block * LANES * channels, packed + block * channels * LANES
        for c in range(0, whole, LANES):
            i, j, step, n = b + c * LANES, a + c, LANES, channels
            if packs:
                i, j, step, n = j, i, n, step
            r = transpose(
                (
                    load(source, i),
                    load(source, i + step),
                    load(source, i + 2 * step),
                    load(source, i + 3 * step),
                    load(source, i + 4 * step),
                    load(source, i + 5 * step),
                    load(source, i + 6 * step),
                    load(source, i + 7 * step),
                )
            )
            store(target, j, r[0])
            store(target, j + n, r[1])
            store(target, j + 2 * n, r[2])
            store(target, j + 3 * n, r[3])
            store(target, j + 4 * n, r[4])
            store(target, j + 5 * n, r[5])
            store(target, j + 6 * n, r[6])
            store(target, j + 7 * n, r[7])
    for k in range(num_factors):
        for c in range(whole if k < num_factors // LANES * LANES else 0, channels):
            i = plain + k * channels + c
            j = packed + ((k // LANES) * channels + c) * LANES + k % LANES
            if packs:
                target[j] = source[i]
            else:
                target[i] = source[j]


@_called
def _pack(x_NKC: Any, unit: bool, out: Any, inverse: Any, part: int, parts: int) -> None:
    """A part of the rows to the packed layout; with `unit` each factor divided by max(‖x‖, ε), and
    by what it was multiplied.
    """
    num_rows, num_factors, channels = x_NKC.shape
    blocks = -(-num_factors // LANES)
    size, width = blocks * channels * LANES, blocks * LANES
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        if num_factors % LANES:
            fill(pointer(out), row * size, size, 0.0)
        turn(x_NKC, row, out, row, num_factors, channels, True)
        if unit:
            make_unit(pointer(out), row * size, pointer(inverse), row * width, channels, blocks)


@_called
def unpack_grad(grads: Any, rows: Any, inverse: Any, out_NKC: Any, part: int, parts: int) -> None:
    """A part of the rows of the gradient of l, the sum of `grads` (packed, and overwritten), to
    that of x where l = x / max(‖x‖, ε); `inverse` is empty where l = x.
    """
    num_rows, num_factors, channels = out_NKC.shape
    blocks = -(-num_factors // LANES)
    size, width = blocks * channels * LANES, blocks * LANES
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        at, grad = row * size, pointer(grads[0])
        for other in range(1, grads.shape[0]):
            add_row(grad, at, pointer(grads[other]), at, size)
        if inverse.size:
            unit, lengths = pointer(rows), pointer(inverse)
            normalise_grad(grad, at, unit, at, lengths, row * width, grad, at, channels, blocks)
        turn(grads[0], row, out_NKC, row, num_factors, channels, False)


def aligned(size: int, like: Tensor) -> Any:
    """Flat and aligned to whole cache lines, which numpy's own memory is not."""
    return like.new_empty(size).numpy()


def pack(x_NKC: Tensor, unit: bool, parts: int) -> tuple[Any, Any]:
    """Packed rows, and the inverse length of every factor when they are made unit."""
    num_rows, num_factors, channels = x_NKC.shape
    width = -(-num_factors // LANES) * LANES
    out = aligned(num_rows * width * channels, x_NKC)
    inverse = aligned(num_rows * width if unit else 0, x_NKC)
    x = x_NKC.detach().contiguous().numpy()
    run_parts(lambda part: _pack(x, unit, out, inverse, part, parts), parts)
    return out, inverse
