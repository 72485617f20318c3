"""Compiled loops of the samplers: how they are compiled, the search that several of them share, and
local ids of the nodes of a subgraph while it grows, a table from gid to local id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from cimage_dist import keyed


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


_DIGIT = 11  # bits sorted at a time

Ints = NDArray[np.int64]

for _function in (keyed.shift_right, keyed.mix):
    register_jitable(_function)


@jit
def _slot(keys, local, gid):  # type: ignore[no-untyped-def]
    """Where the local id of `gid` is or belongs (-1: free): at `gid` itself where there are no
    keys, else by linear probing.
    """
    mask = len(keys) - 1
    if mask < 0:
        return gid
    place = keyed.mix(gid) & mask
    while local[place] >= 0 and keys[place] != gid:
        place = (place + 1) & mask
    return place


@jit
def _insert(keys, local, gids, known, place, fresh):  # type: ignore[no-untyped-def]
    """Local id of every gid; those not known before are numbered from `known` on in order of first
    appearance. Returns how many.
    """
    count = 0
    for i in range(len(gids)):
        gid = np.int64(gids[i])
        slot = _slot(keys, local, gid)
        if local[slot] < 0:
            local[slot] = known + count
            if len(keys) > 0:
                keys[slot] = gid
            fresh[count] = gid
            count += 1
        place[i] = local[slot]
    return count


@jit
def _argsort(gids, bits):  # type: ignore[no-untyped-def]
    """Ascending order of numbers of `bits` bits, by stable passes from the lowest digit."""
    order, other = np.arange(len(gids)), np.empty(len(gids), np.int64)
    place = np.empty(1 << _DIGIT, np.int64)
    for shift in range(0, bits, _DIGIT):
        place[:] = 0
        for i in range(len(gids)):
            place[(gids[i] >> shift) & (len(place) - 1)] += 1
        total = 0
        for digit in range(len(place)):
            count = place[digit]
            place[digit] = total
            total += count
        for i in range(len(order)):
            digit = (gids[order[i]] >> shift) & (len(place) - 1)
            other[place[digit]] = order[i]
            place[digit] += 1
        order, other = other, order
    return order


@jit
def _renumber(keys, local, fresh, order, known, place):  # type: ignore[no-untyped-def]
    """Number the fresh gids again, by `order`."""
    rank = np.empty(len(order), np.int64)
    for new in range(len(order)):
        rank[order[new]] = new
        local[_slot(keys, local, fresh[order[new]])] = known + new
    for i in range(len(place)):
        if place[i] >= known:
            place[i] = known + rank[place[i] - known]


class LocalIds:
    """`nodes[i]` is the gid with local id i. The table is as long as the graph where that is no
    more than a few times the subgraph, else a hash table at most half full.
    """

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.nodes: Ints = np.empty(0, dtype=np.int64)
        self._keys, self._local = np.empty(0, np.int64), np.empty(0, np.int32)

    def add(self, gids: NDArray[np.integer], ascending: bool = True) -> Ints:
        """Local ids of `gids`, int64 like them; new ones are appended to `nodes`, ascending or in
        order of first appearance.
        """
        known = len(self.nodes)
        self._reserve(known + len(gids))
        place, fresh = np.empty(len(gids), np.int64), np.empty(len(gids), np.int64)
        count = _insert(self._keys, self._local, gids, known, place, fresh)
        fresh = fresh[:count]
        if ascending:
            order = _argsort(fresh, self.num_nodes.bit_length())
            _renumber(self._keys, self._local, fresh, order, known, place)
            fresh = fresh[order]
        self.nodes = np.concatenate([self.nodes, fresh])
        return place

    def _reserve(self, count: int) -> None:
        is_direct = len(self._local) == self.num_nodes and not len(self._keys)
        if is_direct or 2 * count <= len(self._keys):
            return
        if self.num_nodes <= 8 * count:
            self._keys, size = np.empty(0, np.int64), self.num_nodes
        else:
            size = 1 << (2 * count).bit_length()
            self._keys = np.empty(size, np.int64)
        self._local = np.full(size, -1, np.int32)
        unused = np.empty_like(self.nodes)
        _insert(self._keys, self._local, self.nodes, 0, unused, unused.copy())
