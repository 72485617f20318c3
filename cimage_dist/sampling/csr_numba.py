"""The same draws as `csr_select`, entry for entry, as compiled row loops, and a hash table for
local ids. Needs numba.

Integer arithmetic is in uint64 throughout: numba turns mixed signed and unsigned operands into
floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from cimage_dist.sampling import csr_select
from cimage_dist.sampling.csr_select import CsrGraph, DrawKeys, Selection
from cimage_dist.sampling.hidden import HiddenEdges

_U64 = np.uint64
_MASK64 = (1 << 64) - 1
_GAMMA = _U64(0x9E3779B97F4A7C15)
_MUL1 = _U64(0xBF58476D1CE4E5B9)
_MUL2 = _U64(0x94D049BB133111EB)
_S11, _S27, _S30, _S31, _ONE = _U64(11), _U64(27), _U64(30), _U64(31), _U64(1)
_NO_PAIRS = np.empty(0, dtype=np.int64)


def _jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compile, keeping the machine code on disk where that is possible (a read-only installation
    has no place for it).
    """
    try:
        return numba.njit(fn, nogil=True, cache=True)
    except RuntimeError:
        return numba.njit(fn, nogil=True)


@_jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> _S30)) * _MUL1
    x = (x ^ (x >> _S27)) * _MUL2
    return x ^ (x >> _S31)


@_jit
def bits(key, item):  # type: ignore[no-untyped-def]
    """keyed.bits on one uint64."""
    return _mix(_mix(item + _GAMMA) + key)


@_jit
def _lower_bound(values, low, high, value):  # type: ignore[no-untyped-def]
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@_jit
def _is_hidden(row, column, pairs, low, high, num_nodes, threshold, extra_key):  # type: ignore[no-untyped-def]
    """Listed (pairs[low:high] are the listed edges of `row`), or below the keyed threshold."""
    if low < high:
        pair = row * num_nodes + column
        place = _lower_bound(pairs, low, high, pair)
        if place < high and pairs[place] == pair:
            return True
    if threshold > 0:
        pair = min(row, column) * num_nodes + max(row, column)
        return (bits(extra_key, _U64(pair)) >> _S11) < threshold
    return False


@_jit
def _insert(values, size, value, capacity):  # type: ignore[no-untyped-def]
    """Insert into the ascending values[:size], dropping the largest beyond `capacity`; returns the
    new size.
    """
    place = size if size < capacity else capacity - 1
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1
    values[place] = value
    return min(size + 1, capacity)


@_jit
def _select_rows(  # type: ignore[no-untyped-def]
    indptr,
    indices,
    targets,
    fanout,
    bound,
    max_draws,
    listed_key,
    drawn_key,
    pairs,
    num_nodes,
    rate,
    threshold,
    extra_key,
    tie_mask,
    entry,
):
    num_targets = len(targets)
    count = np.zeros(num_targets, dtype=np.int64)
    visible = np.zeros(num_targets, dtype=np.float64)
    is_failed = np.zeros(num_targets, dtype=np.bool_)
    best = np.empty(max(fanout, 1), dtype=np.int64)
    offsets = np.empty(bound, dtype=np.int64)
    hashes = np.empty(bound, dtype=np.int64)
    written = 0
    for t in range(num_targets):
        row = targets[t]
        begin = indptr[row]
        degree = indptr[row + 1] - begin
        low = high = 0
        if len(pairs) > 0:
            low = _lower_bound(pairs, 0, len(pairs), row * num_nodes)
            high = _lower_bound(pairs, low, len(pairs), (row + 1) * num_nodes)
        is_doubtful = low < high or threshold > 0
        if fanout < 0 or degree <= fanout:
            start = written
            for i in range(degree):
                if is_doubtful and _is_hidden(
                    row,
                    np.int64(indices[begin + i]),
                    pairs,
                    low,
                    high,
                    num_nodes,
                    threshold,
                    extra_key,
                ):
                    continue
                entry[written] = begin + i
                written += 1
            count[t] = written - start
            visible[t] = written - start
        elif degree <= bound:
            state = bits(listed_key, _U64(row))
            seen = 0
            size = 0
            for i in range(degree):
                if is_doubtful and _is_hidden(
                    row,
                    np.int64(indices[begin + i]),
                    pairs,
                    low,
                    high,
                    num_nodes,
                    threshold,
                    extra_key,
                ):
                    continue
                draw = bits(listed_key, state + _U64(i + 1) * _GAMMA)
                value = np.int64(((draw >> _ONE) & ~tie_mask) | (_U64(i) & tie_mask))
                offsets[seen] = i
                hashes[seen] = value
                seen += 1
                if size < fanout or value < best[fanout - 1]:
                    size = _insert(best, size, value, fanout)
            limit = best[size - 1] if size > 0 else 0
            for j in range(seen):
                if hashes[j] <= limit:
                    entry[written] = begin + offsets[j]
                    written += 1
            count[t] = size
            visible[t] = seen
        else:
            state = bits(drawn_key, _U64(row))
            size = 0
            i = 0
            while size < fanout and i < max_draws:
                draw = bits(drawn_key, state + _U64(i + 1) * _GAMMA)
                i += 1
                place = np.int64(np.float64(draw >> _S11) * 2.0**-53 * degree)
                known = _lower_bound(best, 0, size, place)
                if known < size and best[known] == place:
                    continue
                if is_doubtful and _is_hidden(
                    row,
                    np.int64(indices[begin + place]),
                    pairs,
                    low,
                    high,
                    num_nodes,
                    threshold,
                    extra_key,
                ):
                    continue
                size = _insert(best, size, place, fanout)
            if size < fanout:
                is_failed[t] = True
                continue
            for j in range(size):
                entry[written] = begin + best[j]
                written += 1
            count[t] = size
            visible[t] = max((degree - (high - low)) * (1.0 - rate), np.float64(size))
    return written, count, visible, is_failed


def select(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    fanout: int,
    bound: int,
    keys: DrawKeys,
    hidden: HiddenEdges | None,
) -> Selection:
    """As `csr_select.select`, with the same result."""
    degree = graph.indptr[targets + 1] - graph.indptr[targets]
    entry = np.empty(
        int(degree.sum() if fanout < 0 else np.minimum(degree, fanout).sum()), dtype=np.int64
    )
    pairs, num_nodes, rate, threshold, extra_key = _NO_PAIRS, len(graph.indptr) - 1, 0.0, 0, 0
    if hidden is not None:
        pairs, rate, threshold, extra_key = (
            hidden.pair_keys,
            hidden.extra_rate,
            hidden.threshold,
            hidden.extra_key,
        )
    max_draws = csr_select.num_draws(fanout)[1]
    # Constants of csr_select are passed in: numba's files on disk are renewed when this file
    # changes, not when that one does.
    tie_mask = (1 << csr_select.TIE_BITS) - 1
    listed_key, drawn_key, threshold64, extra64, tie64 = (
        _U64(value & _MASK64) for value in (keys.listed, keys.drawn, threshold, extra_key, tie_mask)
    )
    written, count, visible, is_failed = _select_rows(
        graph.indptr,
        graph.indices,
        targets,
        fanout,
        bound,
        max_draws,
        listed_key,
        drawn_key,
        pairs,
        num_nodes,
        rate,
        threshold64,
        extra64,
        tie64,
        entry,
    )
    selection = Selection(entry[:written], count, visible)
    failed = np.flatnonzero(is_failed)
    if not failed.size:
        return selection
    return csr_select.replace_rows(
        selection, failed, csr_select.rescue(graph, targets[failed], fanout, keys.rescue, hidden)
    )


@_jit
def _find(slots, item, mask):  # type: ignore[no-untyped-def]
    """Slot of `item`, or the empty slot (-1) where it belongs; linear probing."""
    place = np.int64(_mix(_U64(item)) & mask)
    while slots[place, 0] != -1 and slots[place, 0] != item:
        place = (place + 1) & np.int64(mask)
    return place


@_jit
def _insert_ids(slots, known, columns, place, fresh):  # type: ignore[no-untyped-def]
    """Slot of every column, and the slots of those not known before, in order of first appearance;
    returns how many.
    """
    mask = _U64(len(slots) - 1)
    for i in range(len(known)):
        slot = _find(slots, known[i], mask)
        slots[slot, 0] = known[i]
        slots[slot, 1] = i
    num_fresh = 0
    for i in range(len(columns)):
        slot = _find(slots, columns[i], mask)
        if slots[slot, 0] == -1:
            slots[slot, 0] = columns[i]
            fresh[num_fresh] = slot
            num_fresh += 1
        place[i] = slot
    return num_fresh


@_jit
def _label_ids(slots, ordered, num_known, place):  # type: ignore[no-untyped-def]
    for i in range(len(ordered)):
        slots[ordered[i], 1] = num_known + i
    for i in range(len(place)):
        place[i] = slots[place[i], 1]


def relabel(
    known: NDArray[np.int64], columns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `csr_sampler.relabel`, by a hash table instead of a sort of all columns; at most half of
    its (id, local id) slots are used.
    """
    slots = np.full((1 << (2 * (len(known) + len(columns))).bit_length(), 2), -1, dtype=np.int64)
    place, fresh = np.empty_like(columns), np.empty_like(columns)
    fresh = fresh[: _insert_ids(slots, known, columns, place, fresh)]
    gids = slots[fresh, 0]
    order = np.argsort(gids)
    _label_ids(slots, fresh[order], len(known), place)
    return gids[order], place
