"""What `sampling/csr.py` compiles, one row at a time in numpy, written from its description."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cimage_dist import keyed
from cimage_dist.sampling import csr
from cimage_dist.sampling.csr import CsrGraph, DrawKeys, Selection
from cimage_dist.sampling.hidden import HiddenEdges

Ints = NDArray[np.int64]


def words(key: int, row: int, numbers: Ints) -> Ints:
    """Those words of the row's sequence."""
    return keyed.nth_word(key, keyed.word(key, np.array([row])), numbers)


def select_row(
    columns: Ints, row: int, fanout: int, bound: int, keys: DrawKeys, hidden: HiddenEdges
) -> tuple[Ints, float]:
    """Kept places in a row, ascending, and its visible degree."""
    degree = len(columns)
    is_seen = ~hidden.is_hidden(np.full(degree, row), columns)
    seen = np.flatnonzero(is_seen)
    if fanout < 0:
        return seen, len(seen)
    if degree <= bound:
        hashes = (words(keys.listed, row, seen) >> 1) & (2**63 - 1)
        hashes = hashes >> 20 << 20 | seen
    else:
        draws = words(keys.drawn, row, np.arange(csr.max_draws(fanout)))
        places = (((draws >> 11) & (2**53 - 1)) * 2.0**-53 * degree).astype(np.int64)
        fresh = [at for at in dict.fromkeys(places.tolist()) if is_seen[at]]
        if len(fresh) >= fanout:
            expected = hidden.expected_visible(np.array([row]), np.array([degree]))[0]
            return np.sort(fresh[:fanout]), max(expected, fanout)
        hashes = words(keys.rescue, row, seen)
    return np.sort(seen[np.argsort(hashes)[:fanout]]), len(seen)


def select(
    graph: CsrGraph, targets: Ints, fanout: int, bound: int, keys: DrawKeys, hidden: HiddenEdges
) -> Selection:
    """As `csr.select`."""
    entry, kept, visible = [np.empty(0, dtype=np.int64)], [], []
    for row in targets.tolist():
        begin, end = graph.indptr[row], graph.indptr[row + 1]
        columns = graph.indices[begin:end].astype(np.int64)
        places, seen = select_row(columns, row, fanout, bound, keys, hidden)
        entry.append(begin + places)
        kept.append(len(places))
        visible.append(seen)
    return Selection(np.concatenate(entry), np.array(kept), np.array(visible, dtype=np.float64))


def relabel(known: Ints, columns: Ints) -> tuple[Ints, Ints]:
    """(gids not in `known`, ascending; local id of every column)."""
    fresh = np.setdiff1d(columns, known)
    local = {gid: i for i, gid in enumerate([*known.tolist(), *fresh.tolist()])}
    return fresh, np.array([local[gid] for gid in columns.tolist()], dtype=np.int64)
