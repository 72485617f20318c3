"""Compiled passes over 64-bit keys: sorting by digits, and cutting into ranges.

Imported where a graph is large only: compiling takes seconds the first time.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

_DIGIT = 11  # bits; the counts of a digit stay in the first-level cache
_SIZE = 1 << _DIGIT

Keys = NDArray[np.int64]


@numba.njit(nogil=True, cache=True)
def _scatter(keys, out, low, shift, place):  # type: ignore[no-untyped-def]
    """Each key to where the keys of its digit go next, in the order they come."""
    mask = len(place) - 1
    for i in range(len(keys)):
        digit = ((keys[i] - low) >> shift) & mask
        out[place[digit]] = keys[i]
        place[digit] += 1


@numba.njit(nogil=True, cache=True)
def _count(keys, low, shift, counts):  # type: ignore[no-untyped-def]
    mask = len(counts) - 1
    for i in range(len(keys)):
        counts[((keys[i] - low) >> shift) & mask] += 1


@numba.njit(nogil=True, cache=True)
def _drop_repeats(keys):  # type: ignore[no-untyped-def]
    """Move the first of equal neighbours forward; returns how many there are."""
    size = 0
    for i in range(len(keys)):
        if size == 0 or keys[i] != keys[size - 1]:
            keys[size] = keys[i]
            size += 1
    return size


def by_range(keys: Keys, low: int, shift: int, parts: int) -> list[Keys]:
    """The keys in `parts` (a power of two) ranges of width 2^shift from `low` on, unsorted."""
    counts = np.zeros(parts, dtype=np.int64)
    _count(keys, low, shift, counts)
    end = np.cumsum(counts)
    out = np.empty_like(keys)
    _scatter(keys, out, low, shift, end - counts)
    return np.split(out, end[:-1])


def sort_unique(keys: Keys) -> Keys:
    """Ascending without repeats. Stable passes from the lowest digit to the highest that differs,
    from one buffer to the other; `keys` is one of them.
    """
    low = int(keys.min())
    spread, other = int(keys.max()) - low, np.empty_like(keys)
    for shift in range(0, spread.bit_length(), _DIGIT):
        counts = np.zeros(_SIZE, dtype=np.int64)
        _count(keys, low, shift, counts)
        _scatter(keys, other, low, shift, np.cumsum(counts) - counts)
        keys, other = other, keys
    found: Any = keys[: _drop_repeats(keys)]
    return found
