"""A keyed permutation of [0, m) evaluated point by point, so that an epoch's order never has to be
stored.

The seed schedule: which undirected edges, and which negatives, make up the global batch of a step
(§3.3, §3.4).

Undirected edge t in [0, m) is the t-th entry of the strict upper triangle, counted row by row.
Because columns ascend inside a row, those entries are the tail of the row. `UpperEntries` keeps how
many come before every sixteenth row and counts on from there, so that half a byte a node turns t
into a row and into a column, by its distance from the row's end. Permuting t rather than the 2m
directed entries gives every undirected edge once an epoch in batches of constant size, without a
filter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba.extending import register_jitable
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.errors import UserError
from cimage_dist.sampling.local_ids import jit, lower_bound

for _function in (keyed.shift_right, keyed.mix, keyed.word):
    register_jitable(_function)

# Four rounds already make a Feistel network pseudo-random (Luby & Rackoff 1988); on domains of a
# few dozen points the halves are two or three bits wide and more rounds are needed before the order
# of the first few outputs passes a chi-square test.
_ROUNDS = 8


@jit
def _walk(positions, size, half, keys, is_inverse, out):  # type: ignore[no-untyped-def]
    """The network is its own inverse with its keys reversed and the halves exchanged."""
    mask = (1 << half) - 1
    for i in range(len(positions)):
        x = positions[i]
        while True:
            left, right = x >> half, x & mask
            if is_inverse:
                left, right = right, left
            for key in keys:
                left, right = right, left ^ (keyed.word(key, right) & mask)
            if is_inverse:
                left, right = right, left
            x = (left << half) | right
            if x < size:
                break
        out[i] = x


class Bijection:
    """x -> pi(x), a permutation of [0, size) chosen by `key`; memory is that of the positions asked
    for.

    A balanced Feistel network permutes [0, 4^h) with 4^h >= size > 4^(h-1); positions that land
    outside [0, size) are sent through again until they land inside (cycle walking), which keeps the
    map one-to-one. At most 4 passes are expected per position.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 1 << 62:
            raise ValueError(f"a bijection needs a size between 1 and 2^62, not {size}")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = np.array([keyed.derive(key, i) for i in range(_ROUNDS)], dtype=np.int64)

    def __call__(self, positions: Tensor) -> Tensor:
        """The ids at `positions`, both int64 in [0, size), any shape."""
        return self._walked(positions, self._keys, False)

    def inverse(self, ids: Tensor) -> Tensor:
        """The positions at which `ids` come up."""
        return self._walked(ids, self._keys[::-1].copy(), True)

    def _walked(self, x: Tensor, keys: NDArray[np.int64], is_inverse: bool) -> Tensor:
        if x.numel() and (int(x.min()) < 0 or int(x.max()) >= self.size):
            raise ValueError(f"positions must lie in [0, {self.size})")
        given = x.to(torch.int64).contiguous()
        out = torch.empty_like(given)
        flat, found = given.view(-1).numpy(), out.view(-1).numpy()
        _walk(flat, self.size, self._half, keys, is_inverse, found)
        return out

    def __repr__(self) -> str:
        return f"Bijection(size={self.size})"


IntArray = NDArray[np.integer]

# Above this many nodes a uniform pair is so rarely an edge that rejection is not worth the look-up
# (§3.4).
REJECT_UP_TO_NODES = 1_000_000
_RETRIES = 16


@dataclass(frozen=True)
class SeedBatch:
    """Node pairs of a global batch: u, v int64 [B], weight float32 [B]; weight 0 marks padding and
    negatives that could not be placed.
    """

    u: NDArray[np.int64]
    v: NDArray[np.int64]
    weight: NDArray[np.float32]

    @property
    def total(self) -> float:
        """Sum of weights: how many pairs count."""
        return float(self.weight.sum(dtype=np.float64))

    def ordered(self, group: NDArray[np.int64] | None) -> SeedBatch:
        """The same pairs, those whose first ends are of one group [N] beside each other."""
        if group is None:
            return self
        order = np.lexsort((self.u, group[self.u]))
        return SeedBatch(self.u[order], self.v[order], self.weight[order])

    def part(self, begin: int, end: int) -> SeedBatch:
        return SeedBatch(self.u[begin:end], self.v[begin:end], self.weight[begin:end])


def rank_slice(total: int, rank: int, world: int) -> tuple[int, int]:
    """Positions [begin, end) of rank `rank` among `total`; sizes differ by one at most and may be
    zero.
    """
    return total * rank // world, total * (rank + 1) // world


@jit
def _has_edge(indptr, indices, u, v, out):  # type: ignore[no-untyped-def]
    for i in range(len(u)):
        end = indptr[u[i] + 1]
        place = lower_bound(indices, indptr[u[i]], end, v[i])
        out[i] = place < end and indices[place] == v[i]


def has_edge(
    indptr: IntArray, indices: IntArray, u: NDArray[np.int64], v: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether {u, v} is an edge, elementwise, by binary search in row u."""
    out = np.empty(len(u), dtype=np.bool_)
    _has_edge(indptr, indices, u, v, out)
    return out


@jit
def _most_frequent_groups(indptr, indices, group, key, out):  # type: ignore[no-untyped-def]
    """Half of the nodes, by `key`, take the most frequent group among their neighbours."""
    for v in range(len(indptr) - 1):
        out[v] = group[v]
        if indptr[v] == indptr[v + 1] or keyed.word(key, v) & 1:
            continue
        near = np.sort(group[indices[indptr[v] : indptr[v + 1]]])
        most, first = 0, 0
        for i in range(1, len(near) + 1):
            if i < len(near) and near[i] == near[first]:
                continue
            count = i - first
            if count > most or (
                count == most and keyed.word(key, near[first]) > keyed.word(key, out[v])
            ):
                most, out[v] = count, near[first]
            first = i


_GROUP_ROUNDS = 20


def communities(indptr: IntArray, indices: IntArray) -> NDArray[np.int64]:
    """A group for every node by label propagation (Raghavan, Albert & Kumara 2007), int64 [N]: a
    function of the graph alone.
    """
    group = np.arange(len(indptr) - 1)
    for number in range(_GROUP_ROUNDS):
        found = np.empty_like(group)
        _most_frequent_groups(indptr, indices, group, keyed.derive(number), found)
        group = found
    return group


@jit
def _upper_of(indptr, indices, row):  # type: ignore[no-untyped-def]
    """How many columns of a row are above it."""
    end = indptr[row + 1]
    return end - lower_bound(indices, indptr[row], end, row)


@jit
def _count_upper(indptr, indices, rows_apart):  # type: ignore[no-untyped-def]
    num_nodes = len(indptr) - 1
    before = np.zeros(1 + (num_nodes + rows_apart - 1) // rows_apart, np.int64)
    for row in range(num_nodes):
        before[1 + row // rows_apart] += _upper_of(indptr, indices, row)
    return before.cumsum()


@jit
def _find_upper(  # type: ignore[no-untyped-def]
    indptr, indices, before, rows_apart, ids, row, column
):
    for i in range(len(ids)):
        group = np.searchsorted(before, ids[i], side="right") - 1
        left, at = ids[i] - before[group], group * rows_apart
        count = _upper_of(indptr, indices, at)
        while left >= count:
            left -= count
            at += 1
            count = _upper_of(indptr, indices, at)
        row[i], column[i] = at, indices[indptr[at + 1] - count + left]


class UpperEntries:
    """The entries of the strict upper triangle, numbered row by row: 0 <= t < `total`.

    Made in one pass over the rows with a binary search in each. It keeps the number of entries
    before every `rows_apart`-th row, int64, and counts the rows from there on when asked.
    """

    def __init__(self, indptr: IntArray, indices: IntArray, rows_apart: int = 16) -> None:
        self.indptr, self.indices, self.rows_apart = indptr, indices, rows_apart
        self.before = _count_upper(indptr, indices, rows_apart)
        self.total = int(self.before[-1])

    def ends(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, column) with row < column of the entries `ids` [B]."""
        row, column = np.empty_like(ids), np.empty_like(ids)
        _find_upper(self.indptr, self.indices, self.before, self.rows_apart, ids, row, column)
        return row, column


class SeedSchedule:
    """The global batches of a run as a function of (seed, step): every undirected edge exactly once
    an epoch.

    Step s belongs to epoch s // steps_per_epoch; its positions are mapped through the epoch's
    bijection of [0, m). The last batch of an epoch is padded to `batch_edges` by repeating its last
    edge with weight 0. Which endpoint comes first is a keyed coin: neither end is special.
    """

    def __init__(self, indptr: IntArray, indices: IntArray, batch_edges: int, seed: int) -> None:
        if batch_edges < 1:
            raise UserError(
                f"a batch needs at least one edge, but sampler.batch_edges is {batch_edges}. "
                "Set it to 1 or more; 1024 is a good start."
            )
        self.indptr, self.indices = np.asarray(indptr), np.asarray(indices)
        self.upper = UpperEntries(self.indptr, self.indices)
        self.num_nodes = len(self.indptr) - 1
        self.num_edges = self.upper.total
        if 2 * self.num_edges != len(self.indices):
            raise UserError(
                f"the graph is not symmetric, or has self-loops: {len(self.indices)} directed "
                f"entries, but {self.num_edges} of them above the diagonal "
                "where half were expected. Prepare it again with `cimage ingest`, which adds "
                "missing directions and removes loops."
            )
        if self.num_edges == 0:
            raise UserError(
                f"the graph has {self.num_nodes} nodes and no edges, so there is nothing to "
                "sample. Check the edge file, or data.holdout_edges."
            )
        self.batch_edges = batch_edges
        self.seed = seed
        self.steps_per_epoch = -(-self.num_edges // batch_edges)
        self.has_rejection = self.num_nodes <= REJECT_UP_TO_NODES

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def batch(self, step: int) -> SeedBatch:
        """The whole global batch of a step, the same on every rank."""
        epoch = self.epoch_of(step)
        positions = (
            torch.arange(self.batch_edges) + (step % self.steps_per_epoch) * self.batch_edges
        )
        weight = (positions < self.num_edges).to(torch.float32).numpy()
        order = Bijection(self.num_edges, keyed.stream(self.seed, "batch-order", epoch))
        edge_ids = order(positions.clamp(max=self.num_edges - 1))
        row, column = self.endpoints(edge_ids.numpy())
        is_swapped = (
            (keyed.bits(keyed.stream(self.seed, "batch-order", epoch, 1), edge_ids) & 1)
            .to(torch.bool)
            .numpy()
        )
        return SeedBatch(
            np.where(is_swapped, column, row), np.where(is_swapped, row, column), weight
        )

    def endpoints(self, edge_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, column) with row < column of undirected edges `edge_ids` [B]."""
        # Ascending look-ups walk the mapped files forward once instead of jumping about in them.
        order = np.argsort(edge_ids)
        row, column = self.upper.ends(edge_ids[order])
        out_row, out_column = np.empty_like(edge_ids), np.empty_like(edge_ids)
        out_row[order], out_column[order] = row, column
        return out_row, out_column

    def negatives(self, step: int, begin: int = 0, end: int | None = None) -> SeedBatch:
        """Uniform non-edges keyed by their position in the global batch; positions [begin, end),
        all of them by default.

        Self-pairs never occur. Up to REJECT_UP_TO_NODES nodes a true edge is drawn again, at most
        16 times, and then gets weight 0 (only in nearly complete graphs). Positions that pad the
        positives have weight 0 too, so both terms count the same pairs.
        """
        ids = torch.arange(begin, self.batch_edges if end is None else end)
        first = (step % self.steps_per_epoch) * self.batch_edges
        weight = (ids + first < self.num_edges).to(torch.float32).numpy()
        u, v = self._pairs(step, 0, ids)
        if self.has_rejection:
            bad = np.flatnonzero(has_edge(self.indptr, self.indices, u, v))
            for attempt in range(1, _RETRIES + 1):
                if not bad.size:
                    break
                u[bad], v[bad] = self._pairs(step, attempt, ids[torch.from_numpy(bad)])
                bad = bad[has_edge(self.indptr, self.indices, u[bad], v[bad])]
            weight[bad] = 0.0
        return SeedBatch(u, v, weight)

    def _pairs(
        self, step: int, attempt: int, ids: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        key = keyed.stream(self.seed, "negatives", step, attempt)
        u = keyed.integers(key, 2 * ids, self.num_nodes)
        v = (u + 1 + keyed.integers(key, 2 * ids + 1, self.num_nodes - 1)) % self.num_nodes
        return u.numpy(), v.numpy()
