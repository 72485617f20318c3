"""One iteration of routing over the messages into a target, forwards and backwards, compiled.

Layout: see `loops.py`. `coef` holds 2·B·LANES numbers per message and iteration, α then β, at
`at + (e - begin)·stride`; forwards p is left at the place of α.
"""

from __future__ import annotations

from typing import Any

from cimage_dist.nn.kernels.cpu.loops import (
    add_rows,
    compiled,
    fill,
    row_dots,
    scale_values,
    score_grad,
    softmax_rows,
)
from cimage_dist.nn.kernels.cpu.simd import (
    LANES,
)

# messages at a time: their rows stay in the first-level cache between the two readings, their
# softmaxes overlap
GROUP = 8


@compiled
def assign(
    rows: Any,
    ids: Any,
    begin: int,
    end: int,
    centre: Any,
    centre_at: int,
    p: Any,
    p_at: int,
    stride: int,
    share: float,
    inv_tau: float,
    padding: Any,
    channels: int,
    blocks: int,
) -> None:
    """p[e, k] = softmax over k of <rows[u, k], centre[k]> / τ; with share > 0, that constant."""
    if share > 0:
        for e in range(end - begin):
            fill(p, p_at + e * stride, blocks * LANES, share)
    else:
        row_dots(rows, ids, begin, end, centre, centre_at, p, p_at, stride, channels, blocks)
        softmax_rows(p, p_at, stride, end - begin, inv_tau, padding, blocks)


@compiled
def add_messages(
    rows: Any,
    ids: Any,
    weight: Any,
    has_weight: bool,
    begin: int,
    end: int,
    centre: Any,
    centre_at: int,
    share: float,
    inv_tau: float,
    padding: Any,
    p: Any,
    p_at: int,
    stride: int,
    keep: bool,
    scaled: Any,
    out: Any,
    out_at: int,
    channels: int,
    blocks: int,
) -> None:
    """out += Σ_e w·p·rows[u] with p from `assign`. `keep` leaves each message's p in its place,
    otherwise GROUP places are used over and over; `scaled` has room for GROUP messages.
    """
    width = blocks * LANES
    for low in range(begin, end, GROUP):
        high = min(low + GROUP, end)
        at = p_at + (low - begin) * stride if keep else p_at
        assign(
            rows,
            ids,
            low,
            high,
            centre,
            centre_at,
            p,
            at,
            stride,
            share,
            inv_tau,
            padding,
            channels,
            blocks,
        )
        if has_weight:
            for e in range(high - low):
                scale_values(p, at + e * stride, scaled, e * width, weight[low + e], blocks)
            add_rows(out, out_at, rows, ids, low, high, scaled, 0, width, channels, blocks)
        else:
            add_rows(out, out_at, rows, ids, low, high, p, at, stride, channels, blocks)


@compiled
def back_messages(
    rows: Any,
    ids: Any,
    weight: Any,
    has_weight: bool,
    begin: int,
    end: int,
    grad: Any,
    grad_at: int,
    inv_tau: float,
    coef: Any,
    at: int,
    stride: int,
    grad_w: Any,
    wants_grad_w: bool,
    has_centre: bool,
    out: Any,
    out_at: int,
    channels: int,
    blocks: int,
) -> None:
    """Turn p into α and β for every message given g, the gradient of the sum; add to the weights'
    gradients if wanted; with `has_centre` out += Σ β·rows[u], the gradient of the centre.
    """
    width = blocks * LANES
    for low in range(begin, end, GROUP):
        high = min(low + GROUP, end)
        place = at + (low - begin) * stride
        row_dots(rows, ids, low, high, grad, grad_at, coef, place + width, stride, channels, blocks)
        for e in range(low, high):
            w = weight[e] if has_weight else 1.0
            slope = score_grad(coef, place + (e - low) * stride, w, inv_tau, blocks)
            if wants_grad_w:
                grad_w[e] += slope
        if has_centre:
            add_rows(
                out, out_at, rows, ids, low, high, coef, place + width, stride, channels, blocks
            )
