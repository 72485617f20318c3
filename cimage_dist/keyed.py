"""Counter-based randomness: every draw is a function of (seed, step, global id), never of rank or
call order.

The mixer is the 64-bit finaliser of SplitMix64 (Steele, Lea & Flood 2014) applied to each key in
turn. It works on whole tensors, so a million draws are a handful of vector operations, and any
single draw can be recomputed anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

# SplitMix64 constants as signed 64-bit integers (torch has no uint64 arithmetic; wrap-around is
# what we want).
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL2 = 0x94D049BB133111EB - (1 << 64)
_MASK64 = (1 << 64) - 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical (zero-filling) right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MUL1
    x = (x ^ _shift_right(x, 27)) * _MUL2
    return x ^ _shift_right(x, 31)


def _mix_int(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * (_MUL1 & _MASK64)) & _MASK64
    x = ((x ^ (x >> 27)) * (_MUL2 & _MASK64)) & _MASK64
    return x ^ (x >> 31)


def derive(*keys: int) -> int:
    """One signed 64-bit key from any number of integers; `derive(a, b) != derive(b, a)`."""
    state = 0
    for key in keys:
        state = _mix_int(state + (_GAMMA & _MASK64) + (key & _MASK64))
    return state - (1 << 64) if state >= 1 << 63 else state


def bits(key: int, ids: Tensor) -> Tensor:
    """64 random bits per id, as int64. `ids` int64 of any shape."""
    return _mix(_mix(ids.to(torch.int64) + _GAMMA) + key)


def uniform(key: int, ids: Tensor) -> Tensor:
    """float64 in [0, 1) per id, 53 random bits each."""
    return _shift_right(bits(key, ids), 11).to(torch.float64) * 2.0**-53


def integers(key: int, ids: Tensor, high: Tensor | int) -> Tensor:
    """int64 in [0, high) per id; bias below high / 2^53."""
    return (uniform(key, ids) * high).to(torch.int64)


# Named streams, so that two uses of the same (seed, step) never share draws.
STREAM = {
    name: i
    for i, name in enumerate(
        (
            "init",
            "dropout",
            "mask-start",
            "mask-walk",
            "negatives",
            "split",
            "link-split",
            "link-negatives",
            "kmeans",
            "probe",
            "batch-order",
            "mask-extra",
            "ci-blocks",
            "ci-fallback",
            "neighbours",
            "sbm",
            "feature-sample",
            "made-features",
            "growth-bank",
            "diagnostics",
            "refresh-neighbours",
            "refresh-sample",
            "initial-labels",
            "rdgae",
            "dinknet",
            "view-edges",
            "view-columns",
            "teleport",
            "forum",
        ),
        start=1,
    )
}


def stream(seed: int, name: str, *keys: int) -> int:
    """The key of a named stream: `stream(seed, "negatives", step)`."""
    return derive(seed, STREAM[name], *keys)
