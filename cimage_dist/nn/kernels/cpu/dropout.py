"""The compiled loops of dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from cimage_dist.nn.kernels.cpu.simd import LANES, keep_mask, load, multiply, pointer, spread, store
from cimage_dist.nn.kernels.cpu.threads import num_parts, run_parts


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _drop(
    x: Any, out: Any, low: Any, high: Any, threshold: Any, scale: float, parts: int, part: int
) -> None:
    """out[i] = scale·x[i] where hash(key, i) >= threshold, else 0, for a part of the positions."""
    source, target, factor = pointer(x), pointer(out), spread(pointer(x), scale)
    vectors = x.size // LANES
    for i in range(vectors * part // parts * LANES, vectors * (part + 1) // parts * LANES, LANES):
        store(
            target,
            i,
            multiply(
                multiply(factor, keep_mask(source, np.uint64(i), low, high, threshold)),
                load(source, i),
            ),
        )
    if part == parts - 1 and vectors * LANES < x.size:
        rest = np.zeros(LANES, x.dtype)
        store(
            pointer(rest),
            0,
            multiply(factor, keep_mask(source, np.uint64(vectors * LANES), low, high, threshold)),
        )
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


def drop(x: Tensor, p: float, key: int) -> Tensor:
    """x·m/(1-p) with m a function of (key, position)."""
    source = x.detach().contiguous()
    out = torch.empty_like(source)
    flat, target = source.view(-1).numpy(), out.view(-1).numpy()
    parts = num_parts()
    run_parts(partial(_drop, flat, target, *_words(p, key), parts), parts)
    return out
