"""Which entries of which rows a hop keeps, as compiled row loops: uniform draws without replacement
from the visible neighbours.

The draw of a row depends on (key, global id of the row, hidden edges) and on nothing else: not on
the other rows, not on the hop. A smaller fan-out keeps a subset of what a larger one keeps. Rows
are treated by degree:

* up to `list_bound` entries: list the row, drop hidden entries, give each of the rest a keyed hash
  and keep the smallest ones. Any k-subset of the visible neighbours is equally likely, and the
  visible degree is exact.
* longer rows: take positions floor(uniform_i * degree), i = 0, 1, ..., and keep the first k that
  are new and visible. Skipping repeats and hidden entries of an independent uniform sequence leaves
  a uniform draw without replacement, at a cost of O(k) whatever the degree. The visible degree is
  exact if edges are hidden by list only, else its expected value (relative error about sqrt(rate /
  ((1 - rate) * degree)), below 6 % at rate 0.3 and the smallest such degree, 129).
* rows whose sequence runs dry (nearly everything hidden) are listed after all, with fresh hashes.
  Running dry depends on the number of visible neighbours and not on which they are, so the draw
  stays uniform.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from cimage_dist import keyed
from cimage_dist.sampling.hidden import HiddenEdges
from cimage_dist.sampling.local_ids import jit, lower_bound
from cimage_dist.sampling.seeds import IntArray

MAX_FANOUT = 1 << 18
# A hash keeps its upper bits and carries the position in the row below, so two entries of a listed
# row never tie.
_TIE_MASK = (1 << 20) - 1

# Bytes from which an array is read by pages: reading ahead soon has all of a smaller one in memory.
LARGE_BYTES = 1 << 30
_ROWS_AT_ONCE = 1 << 13
_READERS = 16  # pages asked for at a time: a disk answers many requests in the time of one

for _function in (keyed.shift_right, keyed.mix, keyed.word, keyed.nth_word):
    register_jitable(_function)


class CsrGraph(NamedTuple):
    """Row pointers int64 [N+1] and columns [E], ascending in a row; usually mapped files."""

    indptr: NDArray[np.int64]
    indices: IntArray


def is_large(array: Any) -> TypeGuard[NDArray[Any]]:
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        return False
    return array.nbytes >= LARGE_BYTES


def expect_scattered(array: Any) -> None:
    """Do not read ahead in a large mapped array: the kernel would read 128 KB for every row."""
    advice = getattr(mmap, "MADV_RANDOM", None)  # not on every system
    if not is_large(array) or advice is None:
        return
    address = array.ctypes.data
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(begin),
        ctypes.c_size_t(address + array.nbytes - begin),
        ctypes.c_int(advice),
    )
    place = np.zeros(1, dtype=np.int64)
    _touch(array.reshape(-1).view(np.uint8), place, place)  # compiled before processes are forked


def fetch(array: Any, first: NDArray[np.int64], last: NDArray[np.int64] | None = None) -> None:
    """Bring the rows (of a vector: entries) `first` and `last` of a large mapped array into memory,
    several at a time, where reading them one by one would wait for the disk each time.
    """
    if not is_large(array) or not len(first):
        return
    flat, size = array.reshape(-1).view(np.uint8), array.nbytes // len(array)
    begin = first * size
    end = (first if last is None else np.maximum(first, last)) * size + size - 1
    parts = zip(np.array_split(begin, _READERS), np.array_split(end, _READERS), strict=True)
    list(_readers(os.getpid()).map(lambda part: _touch(flat, *part), parts))


def rows_of_pages(array: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """array[rows], so few at a time that they are still in memory when they are copied."""
    out = np.empty((len(rows), *array.shape[1:]), dtype=array.dtype)
    for begin in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[begin : begin + _ROWS_AT_ONCE]
        fetch(array, part)
        np.take(array, part, axis=0, out=out[begin : begin + len(part)], mode="clip")
    return out


@lru_cache(maxsize=1)
def _readers(process: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork: the process number makes a child start its own.
    return ThreadPoolExecutor(_READERS, thread_name_prefix="cimage-pages")


@jit
def _touch(flat, begin, end):  # type: ignore[no-untyped-def]
    found = 0
    for i in range(len(begin)):
        found += flat[begin[i]] + flat[end[i]]
    return found


class Selection(NamedTuple):
    """Kept entries (positions in `indices`, int64 [S], row by row, ascending in a row), how many of
    each row int64 [T], visible degrees float64 [T].
    """

    entry: NDArray[np.int64]
    kept: NDArray[np.int64]
    visible: NDArray[np.float64]


class DrawKeys(NamedTuple):
    """One key for each of the three treatments."""

    listed: int
    drawn: int
    rescue: int


def draw_keys(key: int) -> DrawKeys:
    return DrawKeys(keyed.derive(key, 0), keyed.derive(key, 1), keyed.derive(key, 2))


def list_bound(fanouts: Sequence[int]) -> int:
    """Rows up to this degree are listed. It depends on all fan-outs together, so that a row is
    treated alike in every hop.
    """
    return max(128, 4 * max(fanouts, default=0))


def max_draws(fanout: int) -> int:
    """For a row longer than `list_bound`; without hidden edges about 1.15 * fanout suffice."""
    return 8 * fanout + 32


@register_jitable
def tied_hash(key: int, first: Any, offset: Any) -> Any:
    """The hash of entry `offset` of a listed row, never negative; `first` = word(key, row)."""
    draw = keyed.nth_word(key, first, offset)
    return (keyed.shift_right(draw, 1) & ~_TIE_MASK) | (offset & _TIE_MASK)


@jit
def _listed(hidden, row):  # type: ignore[no-untyped-def]
    """Where the listed edges of a row stand in `pair_keys`."""
    pairs = hidden.pair_keys
    if not hidden.marks[row & (len(hidden.marks) - 1)]:
        return 0, 0
    low = lower_bound(pairs, 0, len(pairs), row * hidden.num_nodes)
    return low, lower_bound(pairs, low, len(pairs), (row + 1) * hidden.num_nodes)


@jit
def _is_hidden(hidden, low, high, row, column):  # type: ignore[no-untyped-def]
    """`HiddenEdges.is_hidden` of one pair; low, high = _listed(hidden, row)."""
    if low < high:
        pair = row * hidden.num_nodes + column
        place = lower_bound(hidden.pair_keys, low, high, pair)
        if place < high and hidden.pair_keys[place] == pair:
            return True
    if hidden.extra_rate > 0:
        pair = min(row, column) * hidden.num_nodes + max(row, column)
        draw = keyed.shift_right(keyed.word(hidden.extra_key, pair), 11) * 2.0**-53
        return draw < hidden.extra_rate
    return False


@jit
def _insert(values, size, value):  # type: ignore[no-untyped-def]
    """Insert into the ascending values[:size], dropping the largest if all places are taken;
    returns the new size.
    """
    place = min(size, len(values) - 1)
    while place > 0 and values[place - 1] > value:
        values[place] = values[place - 1]
        place -= 1
    values[place] = value
    return min(size + 1, len(values))


@jit
def _list_row(graph, row, hidden, out):  # type: ignore[no-untyped-def]
    """The visible entries of a row, whose length `out` has at least; returns how many."""
    begin, size = graph.indptr[row], 0
    degree = graph.indptr[row + 1] - begin
    if hidden.extra_rate > 0:
        # All draws first, then all choices: loops without branches are compiled to vectors.
        for i in range(degree):
            column = np.int64(graph.indices[begin + i])
            pair = min(row, column) * hidden.num_nodes + max(row, column)
            out[i] = keyed.word(hidden.extra_key, pair)
        for i in range(degree):
            is_seen = keyed.shift_right(out[i], 11) * 2.0**-53 >= hidden.extra_rate
            out[size] = begin + i
            size += is_seen
    else:
        for i in range(degree):
            out[i] = begin + i
        size = degree
    low, high = _listed(hidden, row)
    if low == high:
        return size
    seen, size = size, 0
    for i in range(seen):
        pair = row * hidden.num_nodes + np.int64(graph.indices[out[i]])
        place = lower_bound(hidden.pair_keys, low, high, pair)
        if place == high or hidden.pair_keys[place] != pair:
            out[size] = out[i]
            size += 1
    return size


@jit
def _keep_smallest(key, is_tied, row, begin, entries, best, out):  # type: ignore[no-untyped-def]
    """Those entries of a row, at most len(best), whose hashes are smallest; returns how many."""
    first = keyed.word(key, row)
    hashes = np.empty(len(entries), np.int64)
    if is_tied:
        for i in range(len(entries)):
            hashes[i] = tied_hash(key, first, entries[i] - begin)
    else:
        for i in range(len(entries)):
            hashes[i] = keyed.nth_word(key, first, entries[i] - begin)
    size = 0
    for i in range(len(entries)):
        if size < len(best) or hashes[i] < best[-1]:
            size = _insert(best, size, hashes[i])
    kept = 0
    for i in range(len(entries)):
        if hashes[i] <= best[size - 1]:
            out[kept] = entries[i]
            kept += 1
    return kept


@jit
def _draw_row(graph, row, hidden, key, draws, out):  # type: ignore[no-untyped-def]
    """The first len(out) new and visible entries of the row's sequence, ascending; returns whether
    that many were found in `draws` draws.
    """
    low, high = _listed(hidden, row)
    begin = graph.indptr[row]
    degree = graph.indptr[row + 1] - begin
    first = keyed.word(key, row)
    size = 0
    for i in range(draws):
        draw = keyed.shift_right(keyed.nth_word(key, first, i), 11) * 2.0**-53
        at = begin + np.int64(draw * degree)
        known = lower_bound(out, 0, size, at)
        if (known == size or out[known] != at) and not _is_hidden(
            hidden, low, high, row, np.int64(graph.indices[at])
        ):
            size = _insert(out, size, at)
            if size == len(out):
                return True
    return False


@jit
def _select_rows(  # type: ignore[no-untyped-def]
    graph, targets, fanout, bound, draws, keys, hidden, entry
):
    kept, visible = np.empty(len(targets), np.int64), np.empty(len(targets), np.float64)
    short, best = np.empty(bound, np.int64), np.empty(max(fanout, 0), np.int64)
    written = 0
    for t in range(len(targets)):
        row = targets[t]
        begin = graph.indptr[row]
        degree = graph.indptr[row + 1] - begin
        out = entry[written:]
        if fanout < 0 or degree <= fanout:
            kept[t] = visible[t] = _list_row(graph, row, hidden, out)
        elif degree > bound and _draw_row(graph, row, hidden, keys.drawn, draws, out[:fanout]):
            low, high = _listed(hidden, row)
            expected = (degree - (high - low)) * (1.0 - hidden.extra_rate)
            kept[t], visible[t] = fanout, max(expected, np.float64(fanout))
        else:
            is_short = degree <= bound
            listed = short if is_short else np.empty(degree, np.int64)
            listed = listed[: _list_row(graph, row, hidden, listed)]
            key = keys.listed if is_short else keys.rescue
            kept[t] = _keep_smallest(key, is_short, row, begin, listed, best, out)
            visible[t] = len(listed)
        written += kept[t]
    return written, kept, visible


def select(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    fanout: int,
    bound: int,
    keys: DrawKeys,
    hidden: HiddenEdges,
) -> Selection:
    """The entries that each of `targets` (distinct gids, int64 [T]) keeps with this fan-out; -1
    keeps all visible ones.
    """
    degree = graph.indptr[targets + 1] - graph.indptr[targets]
    room = int(degree.sum() if fanout < 0 else np.minimum(degree, fanout).sum())
    entry = np.empty(room, dtype=np.int64)
    written, kept, visible = _select_rows(
        graph, targets, fanout, bound, max_draws(fanout), keys, hidden, entry
    )
    return Selection(entry[:written], kept, visible)


@jit
def _expected(graph, nodes, hidden, out):  # type: ignore[no-untyped-def]
    for i in range(len(nodes)):
        low, high = _listed(hidden, nodes[i])
        degree = graph.indptr[nodes[i] + 1] - graph.indptr[nodes[i]]
        out[i] = (degree - (high - low)) * (1.0 - hidden.extra_rate)


def expected_visible(
    graph: CsrGraph, nodes: NDArray[np.int64], hidden: HiddenEdges
) -> NDArray[np.float32]:
    """`HiddenEdges.expected_visible` of nodes of the graph, float32 like `nodes`."""
    out = np.empty(len(nodes), dtype=np.float32)
    _expected(graph, nodes, hidden, out)
    return out
