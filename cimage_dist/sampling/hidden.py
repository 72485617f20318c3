"""What message passing must not see. On the whole graph, path masking: random walks choose the
edges to hide, and non-edges are drawn to set against them. In a sampled step: the global batch's
seed edges, and a keyed share of all others (§3.3, §11.1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cimage_dist import keyed
from cimage_dist.config import MaskConfig
from cimage_dist.types import EdgeList, Topology

_REJECTION_ROUNDS = 16
_NONE = np.empty(0, dtype=np.int64)


def edge_keys(topology: Topology) -> Tensor:
    """row·N + column of every entry, ascending int64 [E]: the sorted list that membership tests
    search.
    """
    return topology.rows() * topology.num_nodes + topology.indices


def reverse_entries(topology: Topology, keys: Tensor) -> Tensor:
    """Position of the opposite direction of every entry, int64 [E]."""
    return torch.searchsorted(
        keys, topology.indices.to(torch.int64) * topology.num_nodes + topology.rows()
    )


def walk_starts(
    topology: Topology, cfg: MaskConfig, seed: int, epoch: int, view: int = 0
) -> tuple[Tensor, Tensor]:
    """(gid where each walk starts, global id of the walk) (§3.1).

    An exact share of the nodes, the walk named after its node; or the source of every edge kept
    with that probability, the walk named after its edge.
    """
    key = keyed.stream(seed, "mask-start", epoch, view=view)
    if cfg.start == "edge":
        kept = (
            (keyed.uniform(key, torch.arange(topology.num_edges)) < cfg.start_rate)
            .nonzero()
            .squeeze(-1)
        )
        return torch.searchsorted(topology.indptr, kept, right=True) - 1, kept
    draws = keyed.uniform(key, torch.arange(topology.num_nodes))
    chosen = draws.argsort(stable=True)[: int(cfg.start_rate * topology.num_nodes)]
    return chosen, chosen


def walk_edges(
    topology: Topology,
    starts: Tensor,
    walker: Tensor,
    length: int,
    seed: int,
    epoch: int,
    view: int = 0,
) -> Tensor:
    """Entries walked over, unique and ascending (§3.1): from v take entry indptr[v] +
    floor(rand·deg(v)); stop at degree 0.

    A walk's draws are keyed by its global id, so the outcome does not depend on how walks are
    spread over processes.
    """
    at = starts
    walked = []
    for hop in range(length):
        first = topology.indptr[at]
        degree = topology.indptr[at + 1] - first
        alive = degree > 0
        at, walker, first, degree = at[alive], walker[alive], first[alive], degree[alive]
        key = keyed.stream(seed, "mask-walk", epoch, hop, view=view)
        entry = first + keyed.integers(key, walker, degree)
        walked.append(entry)
        at = topology.indices[entry].to(torch.int64)
    return torch.cat(walked).unique()


class MaskedGraph(NamedTuple):
    """`visible`: the messages the encoder sees; `masked`: directed edges to predict, int64 [n,
    2].
    """

    visible: EdgeList
    masked: Tensor


class PathMasker:
    """Draws the mask of an epoch on a whole graph held in memory; keeps the sorted keys and reverse
    entries between epochs.
    """

    def __init__(self, topology: Topology, cfg: MaskConfig, seed: int) -> None:
        self.topology, self.cfg, self.seed = topology, cfg, seed
        self.keys = edge_keys(topology)
        self.reverse = reverse_entries(topology, self.keys)
        self.rows = topology.rows()

    def mask(self, epoch: int, view: int = 0, start_rate: float | None = None) -> MaskedGraph:
        """Masked = walked entries; visible = the rest, symmetrised. With `symmetric` the reverse of
        a masked edge is hidden too.

        Views of one epoch have independent masks. `start_rate` in place of the configured one.
        """
        topology = self.topology
        cfg = self.cfg if start_rate is None else replace(self.cfg, start_rate=start_rate)
        starts, walker = walk_starts(topology, cfg, self.seed, epoch, view)
        hidden = torch.zeros(topology.num_edges, dtype=torch.bool)
        hidden[
            walk_edges(topology, starts, walker, self.cfg.walk_length, self.seed, epoch, view)
        ] = True
        if self.cfg.symmetric:
            hidden |= hidden[self.reverse]
        # An edge whose reverse survived stays visible in both directions: the released behaviour
        # (§3.1).
        seen = ~hidden | ~hidden[self.reverse]
        columns = topology.indices.to(torch.int64)
        masked = torch.stack([self.rows[hidden], columns[hidden]], dim=1)
        return MaskedGraph(EdgeList(columns[seen], self.rows[seen], topology.num_nodes), masked)

    def hide_more(self, visible: EdgeList, step: int, view: int = 0) -> EdgeList:
        """`visible` without the share `hide_rate` of its undirected edges.

        Both directions of {u, v} go when the draw of (seed, step, view, min(u, v), max(u, v)) is
        below the rate.
        """
        if self.cfg.hide_rate == 0:
            return visible
        low, high = torch.minimum(visible.src, visible.dst), torch.maximum(visible.src, visible.dst)
        key = keyed.stream(self.seed, "view-edges", step, view)
        kept = keyed.uniform(key, low * visible.num_nodes + high) >= self.cfg.hide_rate
        return EdgeList(visible.src[kept], visible.dst[kept], visible.num_nodes)

    def negatives(self, count: int, step: int, offset: int = 0) -> Tensor:
        """`count` pairs that are neither edges nor self-loops, keyed by (seed, step, position);
        int64 [n, 2], n <= count.

        Positions that meet an edge in every round (only on nearly complete graphs) are left out.
        """
        num_nodes = self.topology.num_nodes
        position = torch.arange(offset, offset + count)
        pairs = torch.empty((count, 2), dtype=torch.int64)
        open_ = torch.arange(count)
        for attempt in range(_REJECTION_ROUNDS):
            for side in (0, 1):
                pairs[open_, side] = keyed.integers(
                    keyed.stream(self.seed, "negatives", step, attempt, side),
                    position[open_],
                    num_nodes,
                )
            tried = pairs[open_]
            bad = is_edge(self.keys, num_nodes, tried) | (tried[:, 0] == tried[:, 1])
            open_ = open_[bad]
            if open_.numel() == 0:
                return pairs
        keep = torch.ones(count, dtype=torch.bool)
        keep[open_] = False
        return pairs[keep]


def most_masked(cfg: MaskConfig, num_nodes: int, num_edges: int) -> int:
    """The most directed edges that one mask can hide: each step of a walk hides one, and with
    `symmetric` its reverse.
    """
    starts = num_nodes if cfg.start == "node" else num_edges
    walked = int(cfg.start_rate * starts) * cfg.walk_length
    return min(num_edges, walked * (2 if cfg.symmetric else 1))


def is_edge(keys: Tensor, num_nodes: int, pairs: Tensor) -> Tensor:
    """Whether each pair [n, 2] is among the sorted edge keys."""
    wanted = pairs[:, 0] * num_nodes + pairs[:, 1]
    if keys.numel() == 0:
        return torch.zeros_like(wanted, dtype=torch.bool)
    found = torch.searchsorted(keys, wanted).clamp_max(keys.numel() - 1)
    return keys[found] == wanted


class HiddenEdges(NamedTuple):
    """Edge {u, v} is hidden when it is listed, or when uniform(extra_key, min * N + max) <
    extra_rate.

    pair_keys int64 [2b] holds row * N + column of every listed edge in both directions, ascending
    and without repeats; marks[row modulo its length] is true for all rows that occur in it, and for
    few others. Listed pairs must be edges of the graph. Both rules are symmetric, and
    neither depends on rank or on what else is sampled.
    """

    num_nodes: int
    pair_keys: NDArray[np.int64]
    marks: NDArray[np.bool_]
    extra_rate: float = 0.0
    extra_key: int = 0

    def listed_per_row(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many listed edges each row (gid) has, int64 like `rows`."""
        first = rows * self.num_nodes
        return np.searchsorted(self.pair_keys, first + self.num_nodes) - np.searchsorted(
            self.pair_keys, first
        )

    def is_hidden(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each pair (gid, gid) is hidden, elementwise."""
        out = np.zeros(rows.shape, dtype=np.bool_)
        if self.pair_keys.size:
            pairs = rows * self.num_nodes + columns
            place = np.minimum(np.searchsorted(self.pair_keys, pairs), self.pair_keys.size - 1)
            out = self.pair_keys[place] == pairs
        if self.extra_rate > 0:
            pair_ids = np.minimum(rows, columns) * self.num_nodes + np.maximum(rows, columns)
            out |= (
                keyed.uniform(self.extra_key, torch.from_numpy(pair_ids)) < self.extra_rate
            ).numpy()
        return out

    def expected_visible(
        self, rows: NDArray[np.int64], degree: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Visible degree without reading the row: exact for the listed edges, its mean for the
        keyed share.
        """
        return (degree - self.listed_per_row(rows)).astype(np.float64) * (1.0 - self.extra_rate)


def hide(
    num_nodes: int,
    u: NDArray[np.int64] = _NONE,
    v: NDArray[np.int64] = _NONE,
    extra_rate: float = 0.0,
    extra_key: int = 0,
) -> HiddenEdges:
    """Hide the edges {u, v}, both directions, and a share `extra_rate` of all edges drawn by
    `extra_key`; by default nothing.
    """
    # Not np.unique: without an inverse it hashes, which is twenty times slower than this sort.
    keys = np.sort(np.concatenate([u * num_nodes + v, v * num_nodes + u]))
    is_first = np.diff(keys, prepend=-1) != 0
    marks = np.zeros(1 << (16 * len(keys)).bit_length(), dtype=np.bool_)
    marks[np.concatenate([u, v]) & (len(marks) - 1)] = True
    return HiddenEdges(num_nodes, keys[is_first], marks, extra_rate, extra_key)
