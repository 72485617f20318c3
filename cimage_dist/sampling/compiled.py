"""Compiled loops: how they are compiled, and the search that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, keeping the machine code on disk where that is possible (a read-only installation
    has no place for it).
    """
    try:
        return numba.njit(fn, nogil=True, cache=True)
    except RuntimeError:
        return numba.njit(fn, nogil=True)


@jit
def lower_bound(values, low, high, value):  # type: ignore[no-untyped-def]
    """First place in [low, high) of the ascending values that is not below `value`, else high."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
