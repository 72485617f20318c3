"""Edges that message passing must not see in a step: the global batch's seed edges, and a keyed
share of all others (§3.3, §11.1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cimage_dist import keyed

_NONE = np.empty(0, dtype=np.int64)


class HiddenEdges(NamedTuple):
    """Edge {u, v} is hidden when it is listed, or when uniform(extra_key, min * N + max) <
    extra_rate.

    pair_keys int64 [2b] holds row * N + column of every listed edge in both directions, ascending
    and without repeats. Listed pairs must be edges of the graph. Both rules are symmetric, and
    neither depends on rank or on what else is sampled.
    """

    num_nodes: int
    pair_keys: NDArray[np.int64]
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
    return HiddenEdges(num_nodes, keys[is_first], extra_rate, extra_key)
