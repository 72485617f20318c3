"""Sums along messages on the CPU, where torch's index_add takes several times as long; dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cimage_dist.nn.kernels.cpu.parallel import (
    LANES,
    keep_mask,
    load,
    multiply,
    num_parts,
    pointer,
    run_parts,
    spread,
    store,
)


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
    out_TD: Any, indptr: Any, order: Any, x_ND: Any, by: Any, weight: Any, bounds: Any, part: int
) -> None:
    """out[v] += Σ_e weight[e]·x[by[e]] over the messages into v, for the targets of a part."""
    for v in range(bounds[part], bounds[part + 1]):
        for i in range(indptr[v], indptr[v + 1]):
            e = order[i]
            u, w = by[e], weight[e]
            for c in range(x_ND.shape[1]):
                out_TD[v, c] += w * x_ND[u, c]


def add_messages(
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
    work = partial(_sum_rows, out, indptr, order, x, by.numpy(), weights, bounds)
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
