"""One iteration of routing over the messages into a target, forwards and backwards, compiled.

Layout: see `loops.py`. `coef` holds 2·B·LANES numbers per message and iteration, α then β, at
`at + (e - begin)·stride`; forwards p is left at the place of α.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba

from cimage_dist.nn.kernels.cpu.loops import (
    add_rows,
    compiled,
    fill,
    row_dots,
    scale_values,
    score_grad,
    softmax_rows,
)
from cimage_dist.nn.kernels.cpu.simd import LANES, pointer

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


@numba.njit(cache=True, error_model="numpy", nogil=True)
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
