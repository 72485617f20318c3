"""Which entries of which rows a hop keeps: uniform draws without replacement from the visible
neighbours, in numpy.

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

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cimage_dist import keyed
from cimage_dist.sampling.hidden import HiddenEdges
from cimage_dist.sampling.seeds import IntArray

MAX_FANOUT = 1 << 18
# A hash keeps its upper bits and carries the position in the row below, so two entries of a listed
# row never tie.
TIE_BITS = 20
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_INFINITE = np.iinfo(np.int64).max


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


def num_draws(fanout: int) -> tuple[int, int]:
    """Draws tried at first, and at most, for a row longer than `list_bound`; without hidden edges
    about 1.15 * fanout suffice.
    """
    return 2 * fanout + 8, 8 * fanout + 32


def _bits(key: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    return keyed.bits(key, torch.from_numpy(ids)).numpy()


def _row_bits(key: int, state: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """64 bits for draw `offsets` of a row (broadcast): a SplitMix64 sequence started at `state` =
    _bits(key, gid of the row).
    """
    return _bits(key, state + (offsets + 1) * _GAMMA)


def offsets_in_rows(count: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. count-1 for each row, concatenated."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if count.size else 0, dtype=np.int64) - np.repeat(ends - count, count)


class _Kept(NamedTuple):
    """Kept entries of some of the targets: index into the targets (ascending), entry, and per
    treated target its visible degree.
    """

    row: NDArray[np.int64]
    entry: NDArray[np.int64]
    visible: NDArray[np.float64]


class CsrGraph(NamedTuple):
    """Row pointers int64 [N+1] and columns [E], ascending in a row; usually mapped files."""

    indptr: NDArray[np.int64]
    indices: IntArray


def _list_visible(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    which: NDArray[np.int64],
    hidden: HiddenEdges | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(index into targets, offset in its row) of all visible entries of the targets `which`."""
    begin = graph.indptr[targets[which]]
    degree = graph.indptr[targets[which] + 1] - begin
    row, offset = np.repeat(which, degree), offsets_in_rows(degree)
    if hidden is None:
        return row, offset
    # Without a keyed share only rows with a listed edge have to be read.
    is_doubtful = np.repeat(
        (hidden.listed_per_row(targets[which]) > 0) | (hidden.extra_rate > 0), degree
    )
    doubtful = np.flatnonzero(is_doubtful)
    gid = targets[row[doubtful]]
    column = graph.indices[graph.indptr[gid] + offset[doubtful]].astype(np.int64)
    keep = np.ones(len(row), dtype=np.bool_)
    keep[doubtful] = ~hidden.is_hidden(gid, column)
    return row[keep], offset[keep]


def thin(
    row: NDArray[np.int64],
    offset: NDArray[np.int64],
    gids: NDArray[np.int64],
    fanout: int,
    key: int,
) -> NDArray[np.bool_]:
    """Which entries stay when every row keeps its `fanout` smallest hashes; `row` ascending indexes
    `gids`, `offset` is the place in the row.
    """
    keep = np.ones(len(row), dtype=np.bool_)
    count = np.bincount(row, minlength=len(gids))
    over = np.flatnonzero(count > fanout)
    if not over.size:
        return keep
    entries = np.flatnonzero((count > fanout)[row])
    line = np.repeat(np.arange(len(over)), count[over])
    hashes = _row_bits(key, _bits(key, gids[over])[line], offset[entries])
    value = ((hashes >> 1) & (_INFINITE >> TIE_BITS << TIE_BITS)) | (
        offset[entries] & ((1 << TIE_BITS) - 1)
    )
    # Rows are short here (`list_bound`), so a padded table is affordable, and it needs no sort:
    # only the k-th smallest of each line.
    table = np.full((len(over), count[over].max()), _INFINITE)
    table[line, offsets_in_rows(count[over])] = value
    limit = np.partition(table, fanout - 1, axis=1)[:, fanout - 1]
    keep[entries] = value <= limit[line]
    return keep


def _select_listed(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    which: NDArray[np.int64],
    fanout: int,
    key: int,
    hidden: HiddenEdges | None,
) -> _Kept:
    row, offset = _list_visible(graph, targets, which, hidden)
    visible = np.bincount(row, minlength=len(targets))[which]
    if fanout >= 0:
        keep = thin(row, offset, targets, fanout, key)
        row, offset = row[keep], offset[keep]
    return _Kept(row, graph.indptr[targets[row]] + offset, visible.astype(np.float64))


def _select_drawn(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    which: NDArray[np.int64],
    fanout: int,
    draws: int,
    key: int,
    hidden: HiddenEdges | None,
) -> tuple[_Kept, NDArray[np.int64]]:
    """The first `fanout` new and visible positions of each row's sequence; also the targets whose
    `draws` draws were not enough.
    """
    gid = targets[which]
    begin = graph.indptr[gid]
    degree = graph.indptr[gid + 1] - begin
    uniform = (
        (_row_bits(key, _bits(key, gid)[:, None], np.arange(draws)[None, :]) >> 11)
        & ((1 << 53) - 1)
    ) * 2.0**-53
    place = (uniform * degree[:, None]).astype(np.int64)
    order = np.argsort(place, axis=1, kind="stable")
    ranked = np.take_along_axis(place, order, axis=1)
    is_new = np.ones_like(place, dtype=np.bool_)
    np.put_along_axis(is_new, order[:, 1:], ranked[:, 1:] != ranked[:, :-1], axis=1)
    if hidden is not None:
        doubtful = (
            np.arange(len(which))
            if hidden.extra_rate > 0
            else np.flatnonzero(hidden.listed_per_row(gid))
        )
        column = graph.indices[begin[doubtful, None] + place[doubtful]].astype(np.int64)
        is_new[doubtful] &= ~hidden.is_hidden(
            np.broadcast_to(gid[doubtful, None], column.shape), column
        )
    taken = np.cumsum(is_new, axis=1)
    is_done = taken[:, -1] >= fanout
    chosen = np.where(is_new & (taken <= fanout), place, _INFINITE)[is_done]
    chosen = np.sort(chosen, axis=1)[:, :fanout] + begin[is_done, None]
    visible = (
        degree.astype(np.float64)
        if hidden is None
        else np.maximum(hidden.expected_visible(gid, degree), fanout)
    )
    return _Kept(np.repeat(which[is_done], fanout), chosen.reshape(-1), visible[is_done]), which[
        ~is_done
    ]


def _assemble(num_targets: int, parts: Sequence[tuple[NDArray[np.int64], _Kept]]) -> Selection:
    """Put the parts, each (treated targets, kept entries), together in target order; the treated
    targets are disjoint.
    """
    count = np.zeros(num_targets, dtype=np.int64)
    visible = np.zeros(num_targets, dtype=np.float64)
    owns = [np.bincount(kept.row, minlength=num_targets) for _, kept in parts]
    for (which, kept), own in zip(parts, owns, strict=True):
        count += own
        visible[which] = kept.visible
    begin = np.cumsum(count) - count
    entry = np.empty(int(count.sum()), dtype=np.int64)
    for (_, kept), own in zip(parts, owns, strict=True):
        entry[begin[kept.row] + offsets_in_rows(own)] = kept.entry
    return Selection(entry, count, visible)


def replace_rows(selection: Selection, which: NDArray[np.int64], fresh: Selection) -> Selection:
    """`selection` with the targets `which` (indices) replaced by those of `fresh`, in the same
    order.
    """
    is_kept = np.ones(len(selection.kept), dtype=np.bool_)
    is_kept[which] = False
    rows = np.repeat(np.arange(len(selection.kept)), selection.kept)
    old = _Kept(rows[is_kept[rows]], selection.entry[is_kept[rows]], selection.visible[is_kept])
    new = _Kept(np.repeat(which, fresh.kept), fresh.entry, fresh.visible)
    return _assemble(len(selection.kept), [(np.flatnonzero(is_kept), old), (which, new)])


def rescue(
    graph: CsrGraph, targets: NDArray[np.int64], fanout: int, key: int, hidden: HiddenEdges | None
) -> Selection:
    """Long rows listed in full: O(degree), for the few rows in which almost everything is
    hidden.
    """
    row, offset = _list_visible(graph, targets, np.arange(len(targets)), hidden)
    visible = np.bincount(row, minlength=len(targets))
    order = np.lexsort((_row_bits(key, _bits(key, targets)[row], offset), row))
    keep = np.sort(order[offsets_in_rows(visible) < fanout])
    entry = graph.indptr[targets[row[keep]]] + offset[keep]
    return Selection(entry, np.minimum(visible, fanout), visible.astype(np.float64))


def select(
    graph: CsrGraph,
    targets: NDArray[np.int64],
    fanout: int,
    bound: int,
    keys: DrawKeys,
    hidden: HiddenEdges | None,
) -> Selection:
    """The entries that each of `targets` (distinct gids, int64 [T]) keeps with this fan-out; -1
    keeps all visible ones.
    """
    degree = graph.indptr[targets + 1] - graph.indptr[targets]
    is_long = (degree > bound) if fanout >= 0 else np.zeros(len(targets), dtype=np.bool_)
    short = np.flatnonzero(~is_long)
    parts = [(short, _select_listed(graph, targets, short, fanout, keys.listed, hidden))]
    failed = np.flatnonzero(is_long)
    for draws in num_draws(fanout):
        if failed.size:
            tried = failed
            kept, failed = _select_drawn(graph, targets, tried, fanout, draws, keys.drawn, hidden)
            parts.append((np.setdiff1d(tried, failed, assume_unique=True), kept))
    selection = _assemble(len(targets), parts)
    return (
        replace_rows(selection, failed, rescue(graph, targets[failed], fanout, keys.rescue, hidden))
        if failed.size
        else selection
    )
