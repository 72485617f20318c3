"""Counter-based randomness: every draw is a function of (seed, step, global id), never of rank or
call order.

The mixer is the 64-bit finaliser of SplitMix64 (Steele, Lea & Flood 2014) applied to each key in
turn. It works on whole tensors, so a million draws are a handful of vector operations, and any
single draw can be recomputed anywhere. The functions of the type `Words` are the only ones: they
take tensors, arrays and Python integers as they stand, and `sampling/csr.py` compiles them.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# int64 that wrap around; of a Python integer the lower 64 bits count.
Words = TypeVar("Words", int, Tensor, NDArray[np.int64])

# SplitMix64 constants as signed 64-bit integers, since torch has no uint64 arithmetic.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MUL1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MUL2 = 0x94D049BB133111EB - (1 << 64)
_MASK64 = (1 << 64) - 1


def shift_right(x: Words, count: int) -> Words:
    """Logical (zero-filling) right shift of 64 bits."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def mix(x: Words) -> Words:
    """The finaliser: a bijection of 64-bit words."""
    x = (x ^ shift_right(x, 30)) * _MUL1
    x = (x ^ shift_right(x, 27)) * _MUL2
    return x ^ shift_right(x, 31)


def word(key: int, item: Words) -> Words:
    """64 random bits of an item."""
    return mix(mix(item + _GAMMA) + key)


def nth_word(key: int, first: Words, number: Words) -> Words:
    """Word `number` of the SplitMix64 sequence started at `first`, itself a word of the item that
    the sequence belongs to."""
    return word(key, first + (number + 1) * _GAMMA)


def derive(*keys: int) -> int:
    """One signed 64-bit key from any number of integers; `derive(a, b) != derive(b, a)`."""
    state = 0
    for key in keys:
        state = mix(state + _GAMMA + key) & _MASK64
    return state - (1 << 64) if state >= 1 << 63 else state


def bits(key: int, ids: Tensor) -> Tensor:
    """64 random bits per id, as int64. `ids` int64 of any shape."""
    return word(key, ids.to(torch.int64))


def uniform(key: int, ids: Tensor) -> Tensor:
    """float64 in [0, 1) per id, 53 random bits each."""
    return shift_right(bits(key, ids), 11).to(torch.float64) * 2.0**-53


def integers(key: int, ids: Tensor, high: Tensor | int) -> Tensor:
    """int64 in [0, high) per id; bias below high / 2^53."""
    return (uniform(key, ids) * high).to(torch.int64)


_PART = 1 << 20  # ids in memory at a time


def below(key: int, share: float, begin: int, end: int) -> Tensor:
    """Those of the ids begin .. end-1 whose `uniform` is below `share`, ascending."""
    found = torch.empty(0, dtype=torch.int64)
    for at in range(begin, end, _PART):
        part = torch.arange(at, min(at + _PART, end))
        # Joined at once: many small parts would keep the room of the large ones around them.
        found = torch.cat([found, part[uniform(key, part) < share]])
    return found


def highest(key: int, count: int, chosen: int) -> Tensor:
    """The `chosen` ids below `count` with the highest `bits` (all, if there are no more),
    ascending.
    """
    draws = ids = torch.empty(0, dtype=torch.int64)
    for at in range(0, count, _PART):
        part = torch.arange(at, min(at + _PART, count))
        draws, ids = torch.cat([draws, bits(key, part)]), torch.cat([ids, part])
        best = draws.topk(min(chosen, draws.numel())).indices
        draws, ids = draws[best], ids[best]
    return ids.sort().values


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


def stream(seed: int, name: str, *keys: int, view: int = 0) -> int:
    """The key of a named stream: `stream(seed, "negatives", step)`. Views of one step draw by
    themselves; the first adds nothing to the key.
    """
    return derive(seed, STREAM[name], *keys, *([view] if view else []))
